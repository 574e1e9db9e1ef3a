"""The pages that users read are about this code."""

import re
from pathlib import Path

import pytest

from scripts import generate_docs

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_generated_pages_are_what_the_code_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert (generate_docs.main(["--check"]), capsys.readouterr().err) == (0, "")
    assert generate_docs.main(["--nonsense"]) == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert not [target for target in targets if ":" not in target and not (page.parent / target).exists()]


TABLES = sorted((ROOT / "fixtures" / "measured").glob("*.tsv"))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.stem)
def test_tables_of_measurements_say_where_they_come_from(table: Path) -> None:
    lines = table.read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("# ")]
    assert {len(row) for row in rows} == {len(rows[0])}
    assert len(rows) > 1
    assert re.match(r"# (python -m scripts\.|by hand|one line for each campaign)", lines[0])
    assert re.search(r"commits? .*\d{4}-\d\d-\d\d", lines[1])
    assert f"fixtures/measured/{table.name})" in "".join(page.read_text(encoding="utf-8") for page in PAGES)


@pytest.mark.parametrize("page", [*PAGES, *TABLES, ROOT / ".ci" / "run"], ids=lambda page: page.name)
def test_scripts_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {name.replace(".", "/") for name in re.findall(r"\bscripts((?:[./]\w+)+)", text)}
    assert not [name for name in named if not (ROOT / f"scripts{name.removesuffix('/py')}.py").exists()]


def test_the_readme_has_two_commands_that_set_themselves_up() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        assert len(block.splitlines()) == 1
        assert block.startswith("python3 -m venv .venv && .venv/bin/pip install ")
