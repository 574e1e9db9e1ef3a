"""Options from Python that are of another type than they have to be; what objects look like when they are printed."""

from pathlib import Path
from typing import Any

import onnx
import pytest

import onnx2ncnn_opt
from onnx2ncnn_opt import Net, listening
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.api.options import ConvertOptions
from onnx2ncnn_opt.errors import ModelError, UsageError
from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.report import VerifyReport
from testing.models import parsed
from testing.optimized import apply_passes


def model() -> onnx.ModelProto:
    return parsed("(float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }", 17)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"outputs": "linear"}, r"outputs has to be a list of names, not 'linear'; did you mean \['linear'\]\?"),
        ({"skip": "fuse_swish"}, "skip has to be a list"),
        ({"custom": "a::b"}, "custom has to be a list"),
        ({"outputs": 3}, "outputs has to be a list of names, not 3"),
        ({"outputs": [3]}, "outputs has to be a list of names, not "),
        ({"custom": [3]}, "custom has to be a list of names, not "),
        ({"batch_axes": {"x": "0"}}, r"batch_axes\['x'\] has to be an axis or None"),
        ({"values": {3: 1}}, "values has to be a dict by the names of inputs, not "),
        ({"shapes": [1, 4]}, "shapes has to be a dict by the names of inputs"),
        ({"shapes": {"x": "1,4"}}, r"shapes\['x'\] has to be a list"),
        ({"shapes": {"x": 4}}, r"shapes\['x'\] has to be a list"),
        ({"values": 3}, "values has to be a dict"),
        ({"batch_axes": "x"}, "batch_axes has to be a dict"),
        ({"limit": -1}, "limit has to be a whole number"),
        ({"limit": True}, "limit has to be a whole number"),
        ({"release": "20250503"}, "a release is a date like"),
        ({"release": 20990101}, "20990101 is not known here"),
        ({"outputs": iter(["y"])}, "outputs has to be a list of names, not <"),  # to look at it would use it up
    ],
)
def test_types(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        lower(model(), **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"only": "fuse_swish"}, "only has to be a list"),
        ({"only": [3]}, "only has to be a list of names, not "),
        ({"shapes": {"x": "1,2"}}, r"shapes\['x'\] has to be a list"),
        ({"shapes": {"x": [1.5]}}, r"a size in shapes\['x'\] has to be a whole number"),
        ({"bin": 3}, "bin has to be a path, not 3"),
        ({"custom": [3]}, "custom has to be a list of layers such as 'TYPE:COUNTS', and 3 is none"),
    ],
)
def test_types_of_optimize(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        apply_passes("a.param", **{"bin": "a.bin", **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": "x"}, "seed has to be a whole number"),
        ({"seed": -1}, "seed has to be a whole number"),
        ({"timeout": "x"}, "timeout has to be a number of seconds"),
        ({"timeout": 0}, "timeout has to be a number of seconds"),
        ({"modes": "fp32"}, r"modes has to be a list, not 'fp32'; did you mean \['fp32'\]\?"),
        ({"modes": 3}, "modes has to be a list"),
        ({"outputs": "y"}, "outputs has to be a list"),
        ({"feeds": [1]}, "feeds has to be a dict"),
        ({"shapes": 3}, "shapes has to be a dict"),
        ({"values": 3}, "values has to be a dict"),
        ({"on": 3}, "on has to be vulkan"),
        ({"rtol": "x"}, "rtol has to be a number"),
        ({"wanted": 3}, "wanted has to be a Wanted, not 3"),
        ({"modes": [["fp32"]]}, "there is no mode"),
    ],
)
def test_types_of_verification(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        lower(model(), shapes={"x": (1, 4)}).verify(Verification(**options))


@pytest.mark.parametrize("inputs", [None, [1], {3: [1]}])
def test_types_of_runs(inputs: Any, tmp_path: Path) -> None:
    lower(model(), shapes={"x": (1, 4)}).save(tmp_path / "net")
    with Net(tmp_path / "net") as net, pytest.raises(UsageError, match="inputs has to be a dict"):
        net.run(inputs)
    for options, said in (({"timeout": "x"}, "timeout"), ({"bin": 3}, "bin"), ({"on": 3}, "on has to be")):
        with pytest.raises(UsageError, match=said):
            Net(tmp_path / "net", **options)


def test_options_are_arguments_or_one_object(tmp_path: Path) -> None:
    options = ConvertOptions(tmp_path / "a", shapes={"x": (1, 4)}, verification=None)
    onnx2ncnn_opt.convert(model(), options)
    onnx2ncnn_opt.convert(model(), tmp_path / "b", shapes={"x": (1, 4)}, verification=None)
    ends = (".param", ".bin", ".json")
    assert [(tmp_path / f"a.ncnn{end}").read_bytes() for end in ends] == [
        (tmp_path / f"b.ncnn{end}").read_bytes() for end in ends
    ]
    with pytest.raises(TypeError, match="shape"):
        lower(model(), shape={"x": (1, 4)})  # type: ignore[call-overload]


def test_printed_in_one_line(tmp_path: Path) -> None:
    conversion = lower(model())
    assert onnx2ncnn_opt.__version__ in conversion.manifest().tool
    assert repr(conversion) == "Conversion(g: 2 -> 2 layers, x [n, 4]; y [n, 4])"
    assert repr(conversion.model) == "LoadedModel(g: 1 nodes, x: float[n, 4])"
    files = lower(model(), shapes={"x": (1, 4)}).save(tmp_path / "net")
    optimized = apply_passes(files.param, files.bin)
    assert repr(optimized) == "Optimized(2 -> 2 layers, 0 rewrites)"
    assert repr(conversion.manifest()) == "Manifest(x: float32[n, 4] -> y: float32[n, 4]; 2 layers)"
    rows = (OutputReport("y", "y", "ok", max_rel=1e-7), OutputReport("z", None, "missing", mode="fp16"))
    report = VerifyReport(rows, 0, checked="x86-64 fp32, fp16")
    assert repr(report) == "VerifyReport(y ok (1.0e-07), z in fp16 missing; x86-64 fp32, fp16)"
    file = tmp_path / "model.onnx"
    onnx.save(model(), file)
    assert repr(onnx2ncnn_opt.inspect(file)) == f"Inspection({file}: 0 parameters, 2 layers)"
    for result in (conversion, optimized):
        with pytest.raises(UsageError, match="prefix has to be a path, not 3"):
            result.save(3)  # type: ignore[arg-type]


def test_progress(tmp_path: Path) -> None:
    steps: list[str] = []
    with listening(steps.append):
        files = lower(model(), shapes={"x": (1, 4)}).save(tmp_path / "net")
    assert steps[:2] == ["reading the model", "making layers of the operators"]
    assert steps[2].startswith("pass ")
    steps.clear()
    with listening(steps.append):
        apply_passes(files.param, files.bin)
    assert steps[0] == "reading the net"
    assert steps[1].startswith("pass ")


def test_the_format_of_onnx_runtime() -> None:
    with pytest.raises(ModelError, match="it is in ONNX Runtime's own format"):
        lower(b"\x10\x00\x00\x00ORTM" + bytes(100))


@pytest.mark.parametrize(
    ("function", "args", "said"),
    [
        (onnx2ncnn_opt.verify, (3, "a.param"), "a int is not a model"),
        (onnx2ncnn_opt.verify, ("a.onnx", 3), "param has to be a path"),
        (onnx2ncnn_opt.bisect, ("a.onnx", 3), "param has to be a path"),
        (onnx2ncnn_opt.diff, ("a.param", 3), "b has to be a path"),
        (onnx2ncnn_opt.inspect, (3,), "path has to be a path"),
        (lambda seconds: lower(model()).benchmark(seconds=seconds), ("x",), "seconds has to be"),
    ],
)
def test_types_of_other_functions(function: Any, args: tuple[Any, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        function(*args)


def test_long_lines_show_their_ends() -> None:
    text = str(ModelError(f"perm {list(range(100_000))} of a tensor of rank 3"))
    assert len(text) < 600
    assert text.startswith("perm [0, 1, 2, ")
    assert text.endswith("99999] of a tensor of rank 3")


def test_many_lines_are_counted() -> None:
    lines = str(ModelError("\n".join(f"node {i}" for i in range(5000)))).split("\n")
    assert len(lines) == 201
    assert lines[-1] == "... and 4800 more lines"
    assert str(ModelError("a\nb")) == "a\nb"
