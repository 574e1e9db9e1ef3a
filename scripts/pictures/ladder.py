"""The rules of agreement as a ladder, with the outputs of right nets that each rule decided."""

from onnx2ncnn_opt.verdict.rules import RULES
from scripts.measure.measured import read_measured
from scripts.pictures.svg import Box, arrow, picture, text

_SHORT = {
    "equal": "integers and bools: no difference",
    "limit": "16 bits, --rtol: a number",
    "rounding": "fp32: what rounding explains",
    "weights": "weights of 16 or 8 bits",
    "kernels": "winograd's errors; plain kernels agree",
    "quantised": "a model that rounds by itself",
    "decided": "elements that rounding decides",
}
_STEP = 46


def draw() -> dict[str, str]:
    """Return the picture by its file's name."""
    rows = [row for row in read_measured("rules") if not row["source"].startswith("faults")]
    counts = {rule.name: sum(int(row[rule.name]) for row in rows) for rule in RULES}
    outputs = sum(int(row["outputs"]) for row in rows)
    shapes: list[object] = [
        text(12, 24, f"{outputs} outputs of right nets", weight=600),
        text(388, 24, "decided here", "small", anchor="end"),
    ]
    for place, rule in enumerate(RULES):
        y = 36 + _STEP * place
        shapes += [Box(12, y, 290, 36, (rule.name, _SHORT[rule.name]), "blue"), arrow((302, y + 18), (336, y + 18))]
        shapes.append(text(388, y + 23, str(counts[rule.name]), "good", anchor="end", weight=600))
        if place:
            shapes.append(arrow((157, y - 10), (157, y - 1)))
    bottom = 36 + _STEP * len(RULES)
    shapes += [
        arrow((157, bottom - 10), (157, bottom - 1)),
        Box(12, bottom, 376, 40, ("no rule accepts the output", "wrong: exit code 3, no files"), "fill-bad"),
    ]
    title = (
        "The rules of agreement in their order; the first one that accepts an output decides. Else the net is wrong."
    )
    return {"ladder.svg": picture(title, 400, bottom + 52, *shapes)}
