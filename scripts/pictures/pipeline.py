"""The way from a model to files: README's picture."""

from onnx2ncnn_opt.onnx.ops import all_ops
from onnx2ncnn_opt.passes import PASSES
from scripts.pictures.svg import Box, arrow, picture, text


def draw() -> dict[str, str]:
    """Return the picture by its file's name."""
    operators = len({op.qualified_name for op in all_ops()})
    shapes = (
        Box(8, 14, 98, 50, ("model.onnx", "from PyTorch")),
        Box(124, 14, 84, 50, ("importer", f"{operators} operators"), "blue"),
        Box(226, 14, 72, 50, ("passes", f"{len(PASSES)} of them"), "blue"),
        Box(316, 14, 76, 50, ("net", "ncnn")),
        Box(316, 64, 76, 42, ("tail", "NumPy, C++")),
        arrow((106, 39), (122, 39)),
        arrow((208, 39), (224, 39)),
        arrow((298, 39), (314, 39)),
        text(310, 89, "what ncnn lacks", "small", anchor="end"),
        Box(8, 130, 122, 40, ("ONNX Runtime",)),
        Box(316, 130, 76, 40, ("ncnn",)),
        Box(162, 126, 118, 48, ("verdict", "equal numbers?"), "blue"),
        arrow((57, 64), (57, 128)),
        arrow((354, 106), (354, 128)),
        arrow((130, 150), (160, 150)),
        arrow((316, 150), (282, 150)),
        Box(8, 196, 184, 44, ("yes: files are written", "exit code 0"), "fill-good"),
        Box(208, 196, 184, 44, ("no: the wrong output", "is named, exit code 3"), "fill-bad"),
        arrow((196, 174), (130, 194)),
        arrow((246, 174), (290, 194)),
    )
    title = (
        "The importer and the passes make a net of the model, and a tail of nodes that ncnn lacks. "
        "ONNX Runtime runs the model, ncnn runs the net, and files are written only if both give equal numbers."
    )
    return {"pipeline.svg": picture(title, 400, 250, *shapes)}
