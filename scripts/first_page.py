"""README's table of peers, and the Chinese pages, which have the blocks of the English ones."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.measure.measured import read_measured
from scripts.measure.speed import summary

ROOT = Path(__file__).resolve().parent.parent
_NAMES = ("yolo", "classifier", "language-model", "any-param", "honest-converter")
# The English page of each Chinese one.
CHINESE: Mapping[str, str] = {
    "README.zh-CN.md": "README.md",
    **{f"docs/zh/{name}.md": f"docs/{name}.md" for name in _NAMES},
}
_BLOCK = re.compile(r"^```.*?^```$|^    \S[^\n]*\n(?:    [^\n]*\n)*", re.MULTILINE | re.DOTALL)


def with_blocks(page: str, source: str) -> str:
    """Return a page whose blocks of code are those of another page, in their order."""
    blocks = iter(_BLOCK.findall(source))
    assert len(_BLOCK.findall(page)) == len(_BLOCK.findall(source)), page.partition("\n")[0]
    return _BLOCK.sub(lambda _: next(blocks), page)


def numbers(page: str) -> Counter[str]:
    """Return the numbers in the text of a page, without those of blocks."""
    text = re.sub(r"\]\([^)]*\)|<[^>]*>", "", _BLOCK.sub("", page))
    return Counter(re.findall(r"(?<![A-Za-z0-9_.-])\d+(?:[.,]\d+)*(?:e-?\d+)?(?![A-Za-z0-9_])", text))


def peers(is_english: bool) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return the columns and rows that compare us with pnnx, from fixtures/."""
    rows = [row for row in read_measured("architectures") if "-dynamic" not in row["model"]]
    right = [row for row in rows if row["right"] == row["of sizes"]]
    both = [row for row in right if row["pnnx ms"] != "-"]  # pnnx's net has the model's outputs
    layers, theirs = (sum(int(row[column]) for row in both) for column in ("layers", "pnnx layers"))
    refused = sum(row["outcome"] == "refused" for row in rows)
    ours, pnnx = _suite()
    ratio, _, nets = list(summary(read_measured("speed")))[-1][1].removesuffix(")").partition(" (")
    exports, cases, shared = len(rows), ours.total(), len(both)
    outcomes = ours["right"], ours["refused"], ours["wrong"], pnnx["right"], pnnx["no net"], pnnx["wrong"]
    values = (exports, len(right), refused, shared, cases, *outcomes, shared, layers, theirs, nets, ratio)
    words = _ENGLISH if is_english else _WORDS_ZH
    text = words.format(*values)
    columns, *table = (line.split(" | ") for line in text.strip().splitlines())
    return ["", *columns], table


_ENGLISH = """
onnx2ncnn-opt | pnnx | page
{} exports of published models, fixed sizes: right nets | **{}**, {} refused | {} | [how right](docs/measurements.md#how-right)
{} cases of ONNX's own suite: right nets | **{}**, {} refused, {} wrong | {}, {} no net that loads, {} wrong | [operators](docs/ops.md)
layers of the {} nets where both are right | **{}** | {} | [how right](docs/measurements.md#how-right)
speed on one thread, mean of {} nets | **{} times as fast** | 1 | [how fast](docs/measurements.md#how-fast)
a node that ncnn cannot compute | named with reason and hint, exit code 1 | an unknown layer in the net, exit code 0; onnx2ncnn also writes one | [tools](docs/other-tools.md#how-each-cell-was-found)
"""  # noqa: E501  a line for each row
_WORDS_ZH = """
onnx2ncnn-opt | pnnx | 详情
{} 个公开模型的导出文件（固定 shape）：正确的网络 | **{}**，拒绝 {} | {} | [正确性](docs/measurements.md#how-right)
ONNX 自己的测试集中 {} 个用例：正确的网络 | **{}**，拒绝 {}，错误 {} | {}，不能加载 {}，错误 {} | [算子](docs/ops.md)
两者都正确的 {} 个网络的层数 | **{}** | {} | [正确性](docs/measurements.md#how-right)
单线程速度，{} 个网络的平均 | **{} 倍** | 1 | [速度](docs/measurements.md#how-fast)
ncnn 不能计算的节点 | 列出名字、原因和建议，退出码 1 | 网络里出现未知的层，退出码 0；onnx2ncnn 也一样 | [工具](docs/other-tools.md#how-each-cell-was-found)
"""  # noqa: E501


def _suite() -> tuple[Counter[str], Counter[str]]:
    """Return our outcomes and pnnx's for the cases of ONNX's suite that pnnx was run on."""
    ours = dict(line.split("\t")[:2] for line in lines_of("conformance.tsv"))
    theirs = [line.split("\t")[1:] for line in lines_of("pnnx_ops.tsv")]
    return Counter(ours[case] for case, _ in theirs), Counter(outcome for _, outcome in theirs)


def lines_of(name: str) -> list[str]:
    """Return the lines of a table in fixtures/, without its header."""
    return (ROOT / "fixtures" / name).read_text(encoding="utf-8").splitlines()[1:]
