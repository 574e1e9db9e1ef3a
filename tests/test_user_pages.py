"""README and the pages for users: their commands run in an empty folder, and print what the pages say."""

import re
from pathlib import Path

import onnx
import pytest

from scripts import user_pages
from testing.user_models import classifier

PAGES = [user_pages.ROOT / name for name in user_pages.USER_PAGES]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem != "honest-converter"], ids=lambda page: page.stem
)
def test_its_commands_print_what_it_says(page: Path, tmp_path: Path) -> None:
    """tests/regression/test_ci_page.py has the page about CI."""
    user_pages.compare(page, tmp_path)


def test_the_first_page_in_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```$", PAGES[0].read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(program.splitlines()) <= 8
    onnx.save(classifier("x"), tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    assert "'scores': array([[" in capsys.readouterr().out
