"""README and the pages for users: their commands run in an empty folder, and print what the pages say."""

import re
from pathlib import Path

import onnx
import pytest

from scripts import user_pages
from testing.user_models import classifier

PAGES = [user_pages.ROOT / name for name in user_pages.USER_PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_commands_print_what_it_says(page: Path, tmp_path: Path) -> None:
    """README's numbers are of the same model; those of other pages are of models that the tests do not have."""
    is_same = page.name == "README.md"
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= (130 if is_same else 100)
    for step in user_pages.play(text, tmp_path):
        assert step.code == 0 or user_pages.command_may_fail(step.command), step
        written = [user_pages.masked(line, sizes=not is_same) for line in step.written]
        printed = user_pages.chosen(step.written, step.printed)
        assert written == [user_pages.masked(line, sizes=not is_same) for line in printed], (
            f"{step.command}: python -m scripts.user_pages writes what it prints"
        )


def test_the_first_page_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```$", PAGES[0].read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(program.splitlines()) <= 8
    onnx.save(classifier("x"), tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    assert "'scores': array([[" in capsys.readouterr().out
