"""The pages that users read are about this code."""

import re
from pathlib import Path

import pytest
import tomllib

from onnx2ncnn_opt.version import __version__
from scripts import first_page, generate_docs, readme_command, site

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def test_generated_pages_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert (generate_docs.main(["--check"]), capsys.readouterr().err) == (0, "")
    assert generate_docs.main(["--nonsense"]) == 2


@pytest.mark.parametrize("name", first_page.CHINESE)
def test_chinese_pages_have_the_numbers_of_the_english_ones(name: str) -> None:
    """Their blocks are generated; the rest of a page has the same numbers, and as many headings."""
    theirs, ours = ((ROOT / page).read_text(encoding="utf-8") for page in (name, first_page.CHINESE[name]))
    assert first_page.numbers(theirs) == first_page.numbers(ours)
    assert len(re.findall("^## ", theirs, re.MULTILINE)) == len(re.findall("^## ", ours, re.MULTILINE))
    assert set(re.findall(r"`(--[\w-]+)", theirs)) == set(re.findall(r"`(--[\w-]+)", ours))


SOURCE = "https://github.com/onnx2ncnn-opt/onnx2ncnn-opt/"


def links(page: Path) -> list[str]:
    """The targets of links and pictures."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
    return [*re.findall(r"\]\(([^)]+)\)", text), *named, *re.findall(r'(?:src|srcset)="([^"]+)"', text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    files = [target.partition("#")[0] for target in links(page) if ":" not in target]
    ours = [link.partition("#")[0] for link in links(page) if re.match(f"{SOURCE}(blob|tree)/", link)]
    assert not [file for file in files if not (page.parent / file).exists()]
    assert not [link for link in ours if not (ROOT / re.sub(f"^{SOURCE}(blob|tree)/main/", "", link)).exists()]


def test_links_of_the_readme_work_on_an_index_page(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    hook = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = (ROOT / hook["fragments"][0]["path"]).read_text(encoding="utf-8")
    for change in hook["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    page = tmp_path / "README.md"
    page.write_text(text, encoding="utf-8")
    assert [link for link in links(page) if not link.startswith("https://")] == []
    raw = "https://raw.githubusercontent.com/onnx2ncnn-opt/onnx2ncnn-opt/main/"
    found = [link.partition("#")[0] for link in links(page) if link.startswith((f"{SOURCE}blob/main/", raw))]
    assert len(found) > 20
    assert [link for link in found if not (ROOT / re.sub(f"^({SOURCE}blob/main/|{raw})", "", link)).exists()] == []


def test_every_page_is_on_the_site() -> None:
    """Once, under one of five headings; files outside docs/ are links to the repository there."""
    project = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    sections = {name: entries for section in project["nav"] for name, entries in section.items()}
    assert list(sections) == ["Start", "Use", "Check", "Extend", "Inside"]
    files = [file for entries in sections.values() for entry in entries for file in entry.values()]
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(file for file in files if ":" not in file) == sorted(pages)
    text = site.outside(Path("docs/ci.md"), "[a](json.md#x) [b](../fixtures/a.md#b) [c](https://x.org) [d](#here)")
    assert text == f"[a](json.md#x) [b]({site.SOURCE}fixtures/a.md#b) [c](https://x.org) [d](#here)"
    assert site.main([]) == 2


def test_the_badges_are_true() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    versions = [name.rpartition(" ")[2] for name in project["classifiers"] if re.search(r"Python :: 3\.\d", name)]
    assert f"badge/licence-{project['license'].replace('-', '--')}-" in text
    assert f"badge/Python-{versions[0]}_to_{versions[-1]}-" in text
    assert f"{SOURCE}actions/workflows/readme.yml/badge.svg" in text


def test_the_package_names_where_it_comes_from() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    urls = re.findall(r'^\w+ = "(https://.*)"$', text.partition("[project.urls]")[2].partition("\n\n")[0], re.MULTILINE)
    assert len(urls) == 4
    assert all(f"{url}/".startswith(SOURCE) for url in urls)
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    [date] = re.findall(rf"^## \[{re.escape(__version__)}\] - ([\d-]+)$", changes, re.MULTILINE)
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\ndate-released: {date}\n" in citation


def test_every_promise_about_hostile_files_has_its_test() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!it may not|---)(.*) \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) >= 9
    for _, tested in rows:
        assert "::" in tested
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8")


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
    paths = [ROOT / f"scripts{name.removesuffix('/py')}" for name in named]
    assert not [path for path in paths if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists())]


def test_the_readme_has_two_commands_that_set_themselves_up() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        assert len(block.splitlines()) == 1
        assert block.startswith("python3 -m venv .venv && .venv/bin/pip install ")


def test_the_workflow_runs_the_commands_in_both_shells() -> None:
    workflow = (ROOT / ".github" / "workflows" / "readme.yml").read_text(encoding="utf-8")
    assert f"command: [{', '.join(readme_command.NAMES)}]" in workflow
    for name in readme_command.NAMES:
        bash, windows = (readme_command.readme_command(shell, name)[-1] for shell in readme_command.SHELLS)
        there, here = (
            re.findall(r"(?:pip install|convert|pytest) (.*?)(?= &&|$)", text, re.MULTILINE) for text in (windows, bash)
        )
        same = [words.replace("\\", "/").replace('"', "'") for words in there]
        assert [words[: len(each)] for words, each in zip(same, here, strict=True)] == here
    assert readme_command.main([]) == readme_command.main(["nonsense"]) == 2
