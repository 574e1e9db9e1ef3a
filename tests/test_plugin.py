"""Plug-ins as they are installed: packages with metadata, in a process of their own."""

import re
from pathlib import Path

import numpy as np
import pytest

from testing.command import Ended, install_plugin, refused, run, run_well, with_plugin
from testing.handmade import raw, write_net
from testing.models import write_model

CONVERT = ("convert", "model.onnx", "--no-verify")
OPTIMIZE = ("optimize", "in.param", "in.bin", "-o", "out", "--no-verify")
DOCS = Path(__file__).parents[1] / "docs" / "plugins.md"


def python_of_the_page() -> str:
    """The example of docs/plugins.md: importers, a tail operator, a pass and a layer."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    *_, importers, tail, passes, layers = blocks
    return "\n".join((importers, tail, passes, layers))


def net(folder: Path) -> None:
    rng = np.random.default_rng(0)
    lines = (
        "Input data 0 1 data 0=4 1=3 2=2",
        "MyLayer m 1 1 data a 0=2",
        "UnaryOp t 1 1 a b 0=0",
        "UnaryOp u 1 1 b c 0=0",
        "Bias i 1 1 c out 0=2",
    )
    write_net(folder, *lines, weights=raw(rng.standard_normal(2), [0.25, 0.5]), stem="in")


RELU = "(float[1, 8] x) => (float[1, 8] y) { y = Relu(x) }"


def optimize(folder: Path, *options: str) -> Ended:
    return run(folder, *OPTIMIZE, "-v", *options, **with_plugin(folder))


def convert(folder: Path, *options: str) -> Ended:
    return run_well(folder, *CONVERT, *options, **with_plugin(folder))


def test_the_example_of_the_page(tmp_path: Path) -> None:
    net(tmp_path)
    install_plugin(tmp_path, python_of_the_page(), passes="PASSES", layers="MY_LAYER")
    ended = optimize(tmp_path)
    assert (ended.code, ended.err) == (0, "")
    assert ended.lines("rewrite") == [["fuse_my_abs:", "UnaryOp", "'t'", "+", "UnaryOp", "'u'", "=>", "UnaryOp", "'u'"]]
    assert (tmp_path / "out.param").read_text().count("UnaryOp") == 1
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "in.bin").read_bytes()
    listed = run(tmp_path, "passes", **with_plugin(tmp_path))
    assert listed.out.split()[0] == "fuse_my_abs"
    assert optimize(tmp_path, "--skip", "fuse_my_abs").lines("rewrite") == []
    assert optimize(tmp_path, "--only", "fuse_my_abs").code == 0


def test_without_the_plug_in(tmp_path: Path) -> None:
    net(tmp_path)
    (tmp_path / "site").mkdir()
    ended = optimize(tmp_path)
    assert ended.code == 1
    assert "the custom layer 'm' (MyLayer) may have weights" in ended.err
    assert optimize(tmp_path, "--custom", "MyLayer:p0").code == 0
    assert "fuse_my_abs" not in run(tmp_path, "passes").out


def test_convert_knows_the_passes(tmp_path: Path) -> None:
    site = install_plugin(tmp_path, python_of_the_page(), passes="PASSES")
    write_model(tmp_path, "(float[1, 8] x) => (float[1, 8] y) { t = Abs(x) y = Abs(t) }")
    run_well(tmp_path, "convert", "model.onnx", **site)
    assert (tmp_path / "model.ncnn.param").read_text().count("UnaryOp") == 1
    convert(tmp_path, "--no-optimize")
    assert (tmp_path / "model.ncnn.param").read_text().count("UnaryOp") == 2


def test_a_pass_that_makes_a_layer_of_an_unknown_type(tmp_path: Path) -> None:
    code = python_of_the_page().replace("second.having(", 'second.having(type="MyTwice", ')
    site = install_plugin(tmp_path, code, passes="PASSES")
    write_model(tmp_path, "(float[1, 8] x) => (float[1, 8] y) { t = Abs(x) y = Abs(t) }")
    convert(tmp_path)
    assert "MyTwice" in (tmp_path / "model.ncnn.param").read_text()
    failed = run(tmp_path, "convert", "model.onnx", "-o", "other", **site)
    assert failed.code == 3  # ncnn does not have the layer
    assert not list(tmp_path.glob("other*"))


LAYER_OF_A_PASS = """
import numpy as np
from onnx2ncnn_opt.plugin import Layer, custom_layer, op, rewrite

LAYER = custom_layer("MyTanh:p0")

@rewrite(op("TanH", "tanh")("x"), exact=True)
def replace_tanh(tanh, x):
    return Layer("MyTanh", "mine", [x], (), {"p0": 3}, {"weight_0": np.arange(3)})
"""


def test_a_pass_may_make_layers_that_the_package_declares(tmp_path: Path) -> None:
    install_plugin(tmp_path, LAYER_OF_A_PASS, passes="replace_tanh", layers="LAYER")
    write_model(tmp_path, "(float[1, 8] x) => (float[1, 8] y) { y = Tanh(x) }")
    convert(tmp_path)
    assert np.fromfile(tmp_path / "model.ncnn.bin", np.float32).tolist() == [0, 1, 2]


CUSTOM_OPERATORS = (
    "(float[2, 3, 4, 4] x) => (float[2, 3, 4, 4] y) <float[3] g = {1, 2, 3}>"
    "{ a = made.up.Gain<slope = 0.25>(x, g) b = made.up.Twice(a) y = Relu(b) }"
)


def test_importers_of_the_page(tmp_path: Path) -> None:
    code = python_of_the_page().replace("my.domain", "made.up")
    site = install_plugin(tmp_path, code, ops="OPS", layers="MY_LAYER")
    write_model(tmp_path, CUSTOM_OPERATORS)
    convert(tmp_path)
    lines = [line.split() for line in (tmp_path / "model.ncnn.param").read_text().splitlines()[2:]]
    assert [line[0] for line in lines] == ["Input", "MyLayer", "BinaryOp", "ReLU"]
    assert lines[1][6:] == ["0=3", "1=0.25"]
    assert (tmp_path / "model.ncnn.bin").read_bytes() == raw([1, 2, 3])
    listed = run(tmp_path, "ops", **site)
    assert "made.up::Gain" in listed.out
    refused = run(tmp_path, *CONVERT)
    assert refused.code == 1
    assert "made.up::Gain 'a', made.up::Twice 'b': ncnn has no equivalent of this operator" in refused.err


FUNCTION = (
    "(float[1, 8] x) => (float[1, 8] y) { t = made.up.Twice(x) y = Relu(t) }"
    ' <domain: "made.up", opset_import: ["": 18]> Twice (x) => (y) { y = BODY }'
)


def test_a_function_with_an_importer(tmp_path: Path) -> None:
    """ncnn runs the importer's layers, and ONNX Runtime the function's body."""
    site = install_plugin(tmp_path, python_of_the_page().replace("my.domain", "made.up"), ops="OPS", layers="MY_LAYER")
    write_model(tmp_path, FUNCTION.replace("BODY", "Add(x, x)"))
    run_well(tmp_path, "convert", "model.onnx", "--no-optimize", **site)
    assert "0=2 1=1 2=2.0" in " ".join((tmp_path / "model.ncnn.param").read_text().split())
    write_model(tmp_path, FUNCTION.replace("BODY", "Exp(x)"))
    assert run(tmp_path, "convert", "model.onnx", **site).code == 3


OUR_RELU = """
from onnx2ncnn_opt.plugin import ImportContext, Tensor, onnx_op

@onnx_op("Relu", since={since})
def relu(im: ImportContext, x: Tensor) -> Tensor:
    '''Clip.'''
    return im.unary(x, "Clip", min=0.0)
"""


@pytest.mark.parametrize(("since", "layer"), [(14, "Clip"), (19, "ReLU")])
def test_importers_of_plug_ins_win(tmp_path: Path, since: int, layer: str) -> None:
    install_plugin(tmp_path, OUR_RELU.format(since=since), ops="relu")
    write_model(tmp_path, RELU)  # of opset 18
    convert(tmp_path, "--no-optimize")
    assert layer in (tmp_path / "model.ncnn.param").read_text()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("X = print", "of my-plugin is not an importer made with @onnx_op, but builtin_function_or_method"),
        (OUR_RELU.format(since=1).replace("x: Tensor", "x") + "X = relu", "of Relu does not annotate x"),
        (OUR_RELU.format(since=1) + "X = [relu, relu]", "there is an importer of Relu already"),
    ],
)
def test_broken_importers_are_named(tmp_path: Path, code: str, message: str) -> None:
    install_plugin(tmp_path, code, ops="X")
    write_model(tmp_path, RELU)
    assert message in refused(tmp_path, *CONVERT, code=2, **with_plugin(tmp_path))


LAYERS = "from onnx2ncnn_opt.ir.layers import LAYERS"


@pytest.mark.parametrize(
    ("code", "points", "message"),
    [
        ("", {"passes": "PASSES"}, "the plug-in mine (my_plugin:PASSES) of my-plugin cannot be loaded"),
        ("import no_such", {"layers": "X"}, "its import failed: ModuleNotFoundError: No module named 'no_such'"),
        ("X = 1 +", {"passes": "X"}, "cannot be loaded: its import failed: SyntaxError: invalid syntax"),
        ("X = [print]", {"passes": "X"}, "of my-plugin is not a pass, but builtin_function_or_method"),
        ("X = 'ReLU'", {"layers": "X"}, "of my-plugin is not a LayerSpec, but str"),
        (f"{LAYERS}; X = LAYERS['ReLU']", {"layers": "X"}, "ReLU cannot be declared as a custom layer"),
        ("from onnx2ncnn_opt.passes import PASSES as X", {"passes": "X"}, "there is a pass called eliminate_"),
    ],
)
def test_broken_plug_ins_are_named(tmp_path: Path, code: str, points: dict[str, str], message: str) -> None:
    net(tmp_path)
    install_plugin(tmp_path, code, **points)
    ended = optimize(tmp_path, "--custom", "MyLayer:p0")
    # Code that fails is not the caller's mistake; a thing of the wrong kind is.
    assert (ended.code, ended.out) == (1 if "loaded" in message or "import failed" in message else 2, "")
    assert message in ended.err


RAISING = {
    "at import": ("raise RuntimeError('no licence')", "PASSES", "RuntimeError: no licence"),
    "at import, by sys.exit": ("import sys; sys.exit(0)", "PASSES", "it calls sys.exit(0)"),
    "no such name": ("", "PASSES", "has no attribute 'PASSES'"),
    "within a pass": ("raise ZeroDivisionError('by 0')", "PASS", "ZeroDivisionError: by 0"),
    "by sys.exit within a pass": ("import sys; sys.exit(3)", "PASS", "it calls sys.exit(3)"),
    "nonsense": ("return 7", "PASS", "TypeError"),
    "a layer of nothing": ("return Layer('ReLU', 'new', [Blob('nowhere')])", "PASS", "nowhere"),
    "within a sweep": ("raise KeyError('x')", "SWEEP", "KeyError: 'x'"),
    "nonsense in a sweep": ("yield 'x'", "SWEEP", "AttributeError"),
    "within an importer": ("raise OSError('gone')", "OP", "OSError: gone"),
    "nonsense of an importer": ("return 'x'", "OP", "a str is not a result of an importer"),
    "by sys.exit within an importer": ("import sys; sys.exit()", "OP", "it calls sys.exit(None)"),
}
FRAMES = {
    "PASSES": "{body}\n",
    "PASS": "@rewrite(op('TanH')('x'), exact=True)\ndef broken(x):\n    {body}\n",
    "SWEEP": "@graph_pass(exact=True)\ndef broken(graph):\n    {body}\n    yield\n",
    "OP": "@onnx_op('Op', domain='made.up')\ndef broken(im, x: Tensor):\n    {body}\n",
}
IMPORTS = """
from onnx2ncnn_opt.plugin import Blob, Layer, Tensor, graph_pass, onnx_op, op, rewrite
"""


@pytest.mark.parametrize("how", RAISING)
def test_a_broken_plug_in_is_one_error_or_warning(tmp_path: Path, how: str) -> None:
    body, kind, said = RAISING[how]
    name = "PASSES" if kind == "PASSES" else "broken"
    group = "ops" if kind == "OP" else "passes"
    site = install_plugin(tmp_path, IMPORTS + FRAMES[kind].format(body=body), **{group: name})
    if kind == "OP":
        write_model(tmp_path, "(float[1, 8] x) => (float[1, 8] y) { y = made.up.Op(x) }")
        ended = run(tmp_path, *CONVERT, **site)
    else:
        write_net(tmp_path, "Input data 0 1 data 0=4 1=3 2=2", "TanH t 1 1 data out", stem="in")
        ended = run(tmp_path, *OPTIMIZE, **site)
    if kind in ("PASS", "SWEEP"):  # the net is as good without it
        assert (ended.code, ended.err) == (0, "")
        (warning,) = (line for line in ended.out.splitlines() if line.startswith("warning: "))
        assert warning.startswith("warning: the pass broken of the plug-in my_plugin failed: ")
        assert said in warning
        assert "TanH" in (tmp_path / "out.param").read_text()
        return
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("Error: ")
    assert ended.err.count("\n") == 1
    assert "my_plugin" in ended.err
    assert said in ended.err
    assert not {path.name for path in tmp_path.iterdir()} & {"out.param", "model.ncnn.param"}


def test_the_page_names_one_module() -> None:
    """What a plug-in imports stays where it is, whatever moves behind it."""
    named = re.findall(r"^from (onnx2ncnn_opt\S*) import", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(named) == {"onnx2ncnn_opt.plugin"}
