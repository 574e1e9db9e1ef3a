"""Shapes of an SVG that reads on a light and on a dark page: it brings its own background, in both schemes."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_STYLE = """
svg { --back: #ffffff; --line: #8c959f; --text: #1f2328; --dim: #59636e; --box: #f2f5f8; --blue: #ddf4ff;
  --good: #1a7f37; --bad: #cf222e; --fill-good: #dafbe1; --fill-bad: #ffebe9; font-family: system-ui, -apple-system,
  "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif; }
@media (prefers-color-scheme: dark) { svg { --back: #0d1117; --line: #6e7681; --text: #f0f6fc; --dim: #9198a1;
  --box: #1c2128; --blue: #12304f; --good: #3fb950; --bad: #ff7b72; --fill-good: #12361e; --fill-bad: #4a1a1c; } }
text { fill: var(--text); }
.small { font-size: 10.5px; fill: var(--dim); }
.code { font-family: ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace; }
.good { fill: var(--good); } .bad { fill: var(--bad); }
.line { stroke: var(--line); stroke-width: 1.5; fill: none; marker-end: url(#arrow); }
"""


class Box(NamedTuple):
    """A rounded box with lines of text: the first one large, the others small."""

    x: float
    y: float
    width: float
    height: float
    lines: Sequence[str]
    fill: str = "box"

    def __str__(self) -> str:
        """Return the box as SVG."""
        shape = f'<rect x="{self.x:g}" y="{self.y:g}" width="{self.width:g}" height="{self.height:g}" rx="7"'
        middle = self.x + self.width / 2
        top = self.y + self.height / 2 - 8 * (len(self.lines) - 1) + 4.5
        words = [
            text(middle, top + 16 * row, line, "small" if row else "", anchor="middle", weight=0 if row else 600)
            for row, line in enumerate(self.lines)
        ]
        return f'{shape} fill="var(--{self.fill})" stroke="var(--line)"/>' + "".join(words)


def text(x: float, y: float, words: str, style: str = "", *, anchor: str = "start", weight: int = 0) -> str:
    """Return a line of text at its base line."""
    bold = f' font-weight="{weight}"' if weight else ""
    look = f' class="{style}"' if style else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{look}{bold}>{escape(words)}</text>'


def arrow(*points: tuple[float, float]) -> str:
    """Return a line through points, with an arrow at its end."""
    path = " L".join(f"{x:g} {y:g}" for x, y in points)
    return f'<path class="line" d="M{path}"/>'


def picture(title: str, width: float, height: float, *shapes: object, size: float = 13) -> str:
    """Return the file; `title` is read to people who do not see it."""
    box = f"0 0 {width:g} {height:g}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-size="{size:g}" role="img">'
    marker = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="var(--line)"/></marker></defs>'
    )
    back = f'<rect width="{width:g}" height="{height:g}" rx="10" fill="var(--back)"/>'
    lines = [head, f"<title>{escape(title)}</title>", f"<style>{_STYLE}</style>", marker, back, *map(str, shapes)]
    return "\n".join([*lines, "</svg>", ""])
