"""The page's text; test_page_in_browser.py looks at what becomes of it."""

import json
import re
from html.parser import HTMLParser

from onnx2ncnn_opt.report.page import page
from testing.pages import HOSTILE, record


class Parsed(HTMLParser):
    """The elements of a page, and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.title = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        last = self.tags[-1][0] if self.tags else ""
        if last == "script":
            self.scripts.append(data)
        if last == "title":
            self.title += data


def html(*, name: str = "", title: str = "a page") -> str:
    return page([record(3, name=name)], title=title, tool="a tool 1.0")


def test_names_reach_the_page_as_data_only() -> None:
    tame, hostile = Parsed(html()), Parsed(html(name=HOSTILE, title=HOSTILE))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in tame.tags]
    assert [attributes for _, attributes in hostile.tags] == [attributes for _, attributes in tame.tags]
    data = json.loads(hostile.scripts[0])
    assert data["nets"][0]["title"] == HOSTILE
    assert data["nets"][0]["after"][1]["name"] == f"{HOSTILE}layer2"
    assert hostile.title.strip() == HOSTILE


def test_a_lone_surrogate_can_be_written() -> None:
    assert json.loads(Parsed(html(name="\ud800")).scripts[0])["nets"][0]["title"] == "\ud800"
    html(name="\ud800").encode()


def test_numbers_that_json_does_not_have_are_text() -> None:
    net = json.loads(Parsed(html()).scripts[0])["nets"][0]
    assert net["outputs"][1]["max_rel"] == "nan"
    assert net["after"][0]["errors"]["fp16"]["max_rel"] == "inf"


def test_nothing_is_loaded_from_anywhere() -> None:
    text = html()
    assert not re.search(r"(src|href)=.https?:|url\(|@import|fetch\(|XMLHttpRequest|innerHTML|outerHTML", text)
    policy = next(attrs["content"] for tag, attrs in Parsed(text).tags if attrs.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_the_same_records_give_the_same_page() -> None:
    assert html() == html()
