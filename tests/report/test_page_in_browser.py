"""The page in a real browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from onnx2ncnn_opt.report.page import page
from onnx2ncnn_opt.report.record import NetRecord
from testing.browser import Page, browser, find_browser
from testing.pages import HOSTILE, record

LAYERS = 2000

pytestmark = pytest.mark.needs("browser")


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    program = find_browser()
    assert program is not None
    with browser(program) as found:
        found.size(1280, 900)
        found.scheme("light")
        yield found


@pytest.fixture
def shown(tab: Page, tmp_path: Path) -> Iterator[Page]:
    """The tab, which has to end a test without a message on its console or a request but for the file."""
    tab.problems.clear()
    tab.requests.clear()
    yield tab
    assert tab.problems == []
    assert [address for address in tab.requests if not address.startswith("file:")] == []


def show(tab: Page, folder: Path, *records: NetRecord) -> None:
    path = folder / "page.html"
    path.write_text(page(records, title="a page", tool="a tool 1.0"), encoding="utf-8")
    tab.open(path)
    assert tab.run("document.querySelectorAll('h1').length") >= 1


def text(tab: Page, selector: str) -> str:
    found = tab.run(f"document.querySelector({selector!r}).textContent")
    assert isinstance(found, str)
    return found


def test_hostile_names_are_shown_as_text(shown: Page, tmp_path: Path) -> None:
    show(shown, tmp_path, record(20, name=HOSTILE))
    assert shown.run("document.title") == "a page"
    assert shown.run("document.images.length + document.scripts.length") == 2  # the data and the page's own
    assert text(shown, "h1") == HOSTILE
    shown.run("document.querySelector('.net .list').focus()")
    shown.key("End")
    assert HOSTILE in text(shown, "#panel")
    shown.run("document.querySelectorAll('details').forEach(each => each.open = true)")
    shown.settle()
    assert shown.run("document.title") == "a page"


def test_noise_and_time_of_int8_layers(shown: Page, tmp_path: Path) -> None:
    show(shown, tmp_path, record(3))
    rows = shown.run("[...document.querySelectorAll('#int8 tbody tr')].map(row => row.textContent)")
    assert rows[1] == "layer0Convolutionone scale840.040.020 \u00b5s10 \u00b5s3.000.10 %"
    assert "is no faster" in rows[0]
    assert "has no form" in rows[2]
    assert shown.run("getComputedStyle(document.querySelector('#int8 td:nth-child(2)')).whiteSpace") == "nowrap"
    assert text(shown, "#int8 title") == "chosen: 39.5 dB, 30.0 \u00b5s"
    assert shown.run("document.querySelectorAll('#int8 circle').length") == 3


def test_two_thousand_layers(shown: Page, tmp_path: Path) -> None:
    show(shown, tmp_path, record(LAYERS))
    assert shown.run("document.querySelectorAll('*').length") < 2000  # only what is in sight, and a path for a chart
    lists = shown.run("[...document.querySelectorAll('.list')].map(each => each.scrollHeight)")
    assert lists[0] == 2 * LAYERS * 40
    shown.run("document.querySelector('.net .list').scrollTop = 1e9")
    shown.settle()
    assert f"layer{2 * LAYERS - 1}" in text(shown, ".net .list")
    assert shown.run("document.querySelectorAll('.net .row').length") < 60
    assert shown.run("document.querySelectorAll('.strips path').length") < 60


def test_the_keyboard_reaches_everything(shown: Page, tmp_path: Path) -> None:
    show(shown, tmp_path, record(50))
    stops = []
    for _ in range(60):
        shown.key("Tab")
        stops.append(shown.run("(e => e.getAttribute('aria-label') || e.textContent)(document.activeElement)"))
    for wanted in ("Skip to the content", "Layers by error and cost", "Memory over the evaluation order", "Layers"):
        assert wanted in stops
    for wanted in ("The two nets side by side", "Find layers by type, name or ONNX node", "sort by time"):
        assert wanted in stops


def test_a_chart_is_walked_with_the_arrow_keys(shown: Page, tmp_path: Path) -> None:
    show(shown, tmp_path, record(50))
    shown.run("document.querySelector('.strips').focus()")
    shown.key("ArrowRight", times=3)
    slider = "document.querySelector('.strips')"
    assert shown.run(f"{slider}.getAttribute('aria-valuenow')") == "3"
    assert "layer4" in shown.run(f"{slider}.getAttribute('aria-valuetext')")
    assert "layer4" in text(shown, "#panel")
    assert shown.run("!!document.querySelector('.net .cell.active')")  # the lists show the same layer
    assert shown.run("document.querySelectorAll('.net .cell.mate').length") == 2  # and what it was made of
    shown.key("End")
    assert shown.run(f"{slider}.getAttribute('aria-valuenow')") == "50"
    shown.key("Escape")
    assert shown.run("document.getElementById('panel').hidden")


def test_a_list_is_walked_with_the_arrow_keys(shown: Page, tmp_path: Path) -> None:
    show(shown, tmp_path, record(50))
    shown.run("document.querySelector('.net .list').focus()")
    shown.key("ArrowDown", times=4)
    chosen = "document.getElementById(document.activeElement.getAttribute('aria-activedescendant'))"
    assert shown.run(f"{chosen}.getAttribute('aria-selected')") == "true"
    assert "after, 2 of 50" in text(shown, "#panel")
    shown.key("ArrowLeft")
    assert "before, 4 of 100" in text(shown, "#panel")
    assert "read by" in text(shown, "#panel")
    shown.key("End")
    assert "before, 100 of 100" in text(shown, "#panel")


def test_layers_are_found_and_sorted(shown: Page, tmp_path: Path) -> None:
    show(shown, tmp_path, record(50))
    shown.run(
        "(s => { s.value = '/NODE6'; s.dispatchEvent(new Event('input')) })(document.querySelector('[type=search]'))"
    )
    shown.settle()
    rows = shown.run("[...document.querySelectorAll('.net .row')].map(row => row.textContent)")
    assert rows == [
        "ReLUlayer7Convolutionfuselayer6",
        *(f"ReLUlayer{n + 1}Convolutionfuselayer{n}" for n in range(60, 70, 2)),
    ]
    shown.run("[...document.querySelectorAll('.layer-heads button')].find(b => b.textContent == 'MACs').click()")
    shown.settle()
    first = shown.run("document.querySelector('.layers .row').textContent")
    assert first.startswith("50Convolutionlayer98")


def test_near_misses_lead_to_their_layers(shown: Page, tmp_path: Path) -> None:
    show(shown, tmp_path, record(50))
    shown.run("document.querySelector('details.misses').open = true")
    shown.settle()
    shown.run("document.querySelectorAll('details.misses button')[1].click()")
    assert "after, 6 of 50" in text(shown, "#panel")
    assert "fuse:  reason" in text(shown, "#panel")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(shown: Page, tmp_path: Path, scheme: str) -> None:
    """4.5 to 1 at least, for every piece of text, on what is behind it."""
    shown.scheme(scheme)
    show(shown, tmp_path, record(50))
    shown.run("document.querySelector('.net .list').focus()")
    shown.key("ArrowDown", times=2)
    found = shown.run(CONTRAST)
    assert found["count"] > 100
    assert found["low"] == []
    background = shown.run("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    shown.scheme("light")


# Colours as a canvas has them, since color-mix is computed to other notations.
CONTRAST = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = colour => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = colour => {
    const [r, g, b] = colour.slice(0, 3).map(c => (c /= 255, c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const behind = element => {
    for (; element; element = element.parentElement) {
      const colour = rgba(getComputedStyle(element).backgroundColor);
      if (colour[3] > 250) return colour;
    }
    return rgba('white');
  };
  const low = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let count = 0;
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, style = getComputedStyle(element);
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest('script, noscript')) continue;
    const [a, b] = [light(rgba(element instanceof SVGElement ? style.fill : style.color)), light(behind(element))];
    const contrast = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    count++;
    if (contrast < 4.5) low.push([walker.currentNode.data.slice(0, 40), element.className.toString(), contrast]);
  }
  return {count, low};
})()"""


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_nothing_is_wider_than_the_screen(shown: Page, tmp_path: Path, width: int) -> None:
    shown.size(width, 844)
    show(shown, tmp_path, record(50, name="a_name_without_any_place_to_break_" * 5))
    for _ in range(2):
        assert shown.run("document.documentElement.scrollWidth") == width
        shown.run("document.querySelector('.net .list').focus()")
        shown.key("ArrowDown", times=3)
    assert shown.run("Math.max(...[...document.querySelectorAll('#outputs tr')].map(row => row.offsetHeight))") < 700
    # The rule's name is not broken into letters.
    assert shown.run("document.querySelector('#outputs td:nth-last-child(2)').offsetWidth") >= 90
    # The panel leaves the layer that it is about in sight.
    shown.run("document.querySelector('.net .list').scrollIntoView({block: 'start', behavior: 'instant'})")
    shown.settle()
    cell, panel = (
        shown.run(
            f"(r => [r.left, r.top, r.right, r.bottom])(document.querySelector({selector!r}).getBoundingClientRect())"
        )
        for selector in (".net .cell.active", "#panel")
    )
    assert cell[2] <= panel[0] + 1 or cell[3] <= panel[1] + 1
    shown.size(1280, 900)


def test_several_nets(shown: Page, tmp_path: Path) -> None:
    show(shown, tmp_path, record(5, name="first "), record(7, name="second "))
    shown.run("document.querySelectorAll('.nets button')[1].click()")
    shown.settle()
    assert "second layer0" in text(shown, ".layers .list")
    assert shown.run("document.querySelectorAll('.net .list').length") == 1


def test_a_record_of_nothing_but_a_verdict(shown: Page, tmp_path: Path) -> None:
    show(shown, tmp_path, NetRecord("a net", "unverified", "Nothing was run."))
    assert text(shown, ".badge") == "? not verified"
