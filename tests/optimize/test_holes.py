"""What other tools lose or break when they read and write a net, each as a net in .param text that has to survive."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx2ncnn_opt.api.optimize import Optimized
from onnx2ncnn_opt.errors import BinError, RunError, UsageError, VerificationError
from onnx2ncnn_opt.ir.weight import Array
from onnx2ncnn_opt.param.text import format_param
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from testing.handmade import raw, tagged, write_net
from testing.optimized import apply_passes
from testing.param_text import write_filled

INPUT = "Input data 0 1 data 0=4 1=3 2=2"


def values(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def check_same(result: Optimized, worker: NcnnWorker) -> None:
    """Compare the outputs with the original's, bit by bit."""
    report = result.verify(worker=worker)
    assert [(output.status, output.max_abs) for output in report.outputs] == [("ok", 0.0)] * len(report.outputs)
    assert report.outputs


def line_of(text: str, type: str) -> list[str]:
    (line,) = (line.split() for line in text.splitlines() if line.startswith(f"{type} "))
    return line


# What ncnn's Python cannot run alone is not verified.
UNVERIFIED = ("Cast", "Packing", "Einsum", "ArgMax", "SPP", "PriorBox")


@pytest.mark.parametrize(
    "lines",
    [
        (INPUT, "Flip l 1 1 data out -23300=2,0,2"),
        (INPUT, "Shrink l 1 1 data out 0=0.25 1=0.75"),
        (INPUT, "SELU l 1 1 data out 0=1.5 1=0.9"),
        (INPUT, "StatisticsPooling l 1 1 data out 0=1"),
        (INPUT, "Cast l 1 1 data out 0=1 1=1"),
        (INPUT, "Packing l 1 1 data out 0=1"),
        (INPUT, "Einsum l 1 1 data out -23300=7,105,106,107,45,62,105,107"),
        (INPUT, "ArgMax l 1 1 data out 0=1 1=3"),
        (INPUT, "SPP l 1 1 data out 0=1 1=2"),
        (INPUT, "MVN l 1 1 data out 0=1 1=1 2=0.125"),
        ("Input data 0 1 data 0=64", "Spectrogram s 1 1 data out 0=16 1=2 2=4 4=1 5=1"),
        ("Input data 0 1 data 0=2 1=9 2=9", "InverseSpectrogram s 1 1 data out 0=16 1=1 2=4 4=1 5=1"),
        ("Input data 0 1 data 0=9", "Slice s 1 3 data a b c -23302=2,2,5"),
        (INPUT, "Reshape in 1 1 data a 0=4 1=3 2=2 13=0", "Reshape out 1 1 a out 0=4 1=3 2=2 12=0"),
        ("Input data 0 1 data 0=4 1=3 2=2 11=2", "ReLU r 1 1 data out"),
        (INPUT, "PriorBox p 1 1 data out -23300=1,2.0 -23301=1,4.0 -23302=1,2.0 7=1 8=1 14=1 15=1"),
        (INPUT, 'AbsVal a 1 1 data out 7=3 8=1.5 9="text" -23310=2,1,2 -23330=4,3,4,3,2'),
    ],
    ids=lambda lines: lines[1].split()[0],
)
def test_parameters_stay(tmp_path: Path, worker: NcnnWorker, lines: tuple[str, ...]) -> None:
    result = apply_passes(*write_net(tmp_path, *lines))
    written = [line.split() for line in format_param(result.graph).splitlines()[2:]]
    assert written == [line.split() for line in lines]
    if not lines[1].startswith(UNVERIFIED):
        check_same(result, worker)


def test_faults_in_small_outputs_are_found(tmp_path: Path, worker: NcnnWorker) -> None:
    result = apply_passes(*write_net(tmp_path, INPUT, "TanH t 1 1 data a", "BinaryOp b 1 1 a out 0=2 1=1 2=1e-08"))
    check_same(result, worker)
    scale = next(layer for layer in result.graph if layer.type == "BinaryOp")
    scale.params["b"] = 1.02e-8
    assert [output.status for output in result.verify(worker=worker).outputs] == ["mismatch"]


def test_feature_masks(tmp_path: Path, worker: NcnnWorker) -> None:
    lines = (
        INPUT,
        "Convolution c 1 1 data a 0=3 1=1 5=1 6=6 31=3",
        "BatchNorm n 1 1 a b 0=3",
        "ReLU r 1 1 b c 31=3",
        "Softmax l 1 1 c out 1=1 31=1",
    )
    result = apply_passes(*write_filled(tmp_path, *lines))
    assert result.verify(worker=worker).ok
    masked = [layer for layer in result.graph if layer.type in ("Convolution", "Softmax")]
    assert [layer.params.get("featmask") for layer in masked] == [3, 1]


@pytest.mark.parametrize("number", [1234.56789, 0.1, 1e-30, 16777217.0, 3.4028235e38])
def test_floats_keep_their_bits(tmp_path: Path, worker: NcnnWorker, number: float) -> None:
    result = apply_passes(*write_net(tmp_path, INPUT, f"Power p 1 1 data out 1={number!r}"))
    (power,) = (layer for layer in result.graph if layer.type == "Power")
    assert np.float32(power["scale"]) == np.float32(number)
    files = result.save(tmp_path / "again")
    (power,) = (layer for layer in apply_passes(files.param, files.bin).graph if layer.type == "Power")
    assert np.float32(power["scale"]) == np.float32(number)


def test_no_shape_hints_by_default(tmp_path: Path, worker: NcnnWorker) -> None:
    files = write_net(tmp_path, INPUT, "ReLU r 1 1 data a", "Declared m 1 1 a b", "AbsVal v 1 1 b out")
    assert "-23330" not in format_param(apply_passes(*files).graph)
    text = format_param(apply_passes(*files, shape_hints=True).graph)
    assert line_of(text, "ReLU")[6:] == ["-23330=4,3,4,3,2"]
    assert line_of(text, "Input")[-1] == "-23330=4,3,4,3,2"
    assert line_of(text, "Declared")[6:] == line_of(text, "AbsVal")[6:] == []


def test_custom_layers_without_weights_stay(tmp_path: Path) -> None:
    mine = 'Declared m 2 2 b data c d 0=3 1=0.5 2="a b" -23303=2,1.5,2.0 31=2'
    files = write_net(tmp_path, INPUT, "AbsVal a 1 1 data b", mine, "ReLU r 1 1 c e")
    text = format_param(apply_passes(*files).graph)
    assert line_of(text, "Declared")[8:] == ["0=3", "1=0.5", '2="a', 'b"', "-23303=2,1.5,2.0", "31=2"]
    assert line_of(text, "ReLU")[4:] == [line_of(text, "Declared")[6], "e"]


def test_custom_layers_with_weights_are_declared(tmp_path: Path) -> None:
    lines = INPUT, "Declared m 1 1 data a 0=2 1=6", "Bias b 1 1 a out 0=2"
    files = write_net(tmp_path, *lines, weights=tagged(values(6)) + raw(values(2), values(2, seed=1)))
    with pytest.raises(
        BinError, match=r"bytes are left over .* 'm' \(Declared\) may have weights: .*--custom Declared:p6@tagged"
    ):
        apply_passes(*files)
    with pytest.raises(UsageError, match="does not declare a custom layer"):
        apply_passes(*files, custom=["Declared=6"])
    with pytest.raises(UsageError, match="there is no p30"):
        apply_passes(*files, custom=["Declared:p30"])
    result = apply_passes(*files, custom=["Declared:p1@tagged,p0"])
    assert np.array_equal(result.graph.layers[-1].weights["bias_data"], values(2, seed=1))
    copy = result.save(tmp_path / "copy")
    assert copy.bin.read_bytes() == files[1].read_bytes()
    with pytest.raises(BinError, match="may have weights"):  # a declaration holds for one call
        apply_passes(*files)


def test_names_and_kinds_of_outputs_stay(tmp_path: Path, worker: NcnnWorker) -> None:
    lines = (
        INPUT,
        "Input unused 0 1 other",
        "Noop n 1 1 data same",  # an output that is the input
        "Split s 1 3 same same_0 same_1 first",
        "MemoryData m 0 1 constant 0=5",  # a constant output
        "Dropout d 1 1 same_0 dropped",
        "Split t 1 2 dropped dropped_0 second",  # used, and an output as well
        "ReLU r 1 1 dropped_0 third",
        "Noop z 1 1 same_1 fourth",
    )
    result = apply_passes(*write_filled(tmp_path, *lines))
    check_same(result, worker)
    assert {blob.name for blob in result.graph.inputs} == {"data", "other"}
    outputs = {blob.name for blob in result.graph.outputs}
    assert outputs == {"other", "first", "constant", "second", "third", "fourth"}
    assert len(result.graph) < len(lines)


def test_dynamic_weights(tmp_path: Path, worker: NcnnWorker) -> None:
    lines = (
        INPUT,
        "Input kernel 0 1 kernel 0=1 1=1 11=2 2=3",
        "Convolution c 2 1 data kernel a 0=3 1=1 6=6 19=1",
        "BatchNorm n 1 1 a b 0=3",
        "ReLU r 1 1 b out",
    )
    result = apply_passes(*write_filled(tmp_path, *lines))
    assert result.verify(worker=worker).ok
    assert [layer.type for layer in result.graph][:3] == ["Input", "Input", "Convolution"]
    assert "BatchNorm" in [layer.type for layer in result.graph]


def test_int8_layers_stay(tmp_path: Path, worker: NcnnWorker) -> None:
    lines = (
        INPUT,
        "Convolution c 1 1 data a 0=3 1=1 5=1 6=6 8=2",
        "BatchNorm n 1 1 a b 0=3",
        "ReLU r 1 1 b out",
    )
    weights = tagged(values(6)) + raw(values(3), abs(values(3)) + 40, [30.0])
    norm = raw(abs(values(3)), values(3), abs(values(3)) + 1, values(3))
    for storage in (None, "fp16"):
        result = apply_passes(*write_net(tmp_path, *lines, weights=weights + norm), storage=storage)
        assert result.verify(worker=worker).ok
        assert result.save(tmp_path / "out").bin.read_bytes()[: len(weights)] == weights
        assert "8=2" in line_of(format_param(result.graph), "Convolution")


@pytest.mark.parametrize("above", ["Pooling p 1 1 data a 0=1 4=1", "InnerProduct p 1 1 data a 0=2 2=48"])
@pytest.mark.parametrize("params", ["0=3 1=3 4=1 6=54", "0=3 1=1 4=1 6=6", "0=3 1=1 6=6 19=1"])
def test_convolutions_of_a_vector_that_are_not_an_innerproduct(tmp_path: Path, above: str, params: str) -> None:
    inputs = "a kernel" if "19=1" in params else "a"
    lines = (
        INPUT,
        "Input kernel 0 1 kernel 0=1 1=1 11=2 2=3",
        above,
        f"Convolution c {len(inputs.split())} 1 {inputs} out {params}",
    )
    text = format_param(apply_passes(*write_filled(tmp_path, *lines)).graph)
    assert line_of(text, "Convolution")[4:] == [*inputs.split(), "out", *params.split()]


def test_a_cut_can_be_loaded(tmp_path: Path, worker: NcnnWorker) -> None:
    lines = (
        INPUT,
        "Convolution c 1 1 data a 0=3 1=1 5=1 6=6",
        "Split s 1 2 a a_0 a_1",
        "Sigmoid g 1 1 a_0 b",
        "BinaryOp m 2 1 a_1 b c 0=2",
        "Bias i 1 1 c d 0=3",
        "ReLU r 1 1 d out",
    )
    files = write_filled(tmp_path, *lines)
    for start, end, inputs, outputs, size in (
        ([], ["c"], {"data": (2, 3, 4)}, ["c"], 10 * 4),
        (["a"], [], {"a": (3, 3, 4)}, ["out"], 3 * 4),
        (["a_1"], ["d"], {"a_1": (3, 3, 4)}, ["d"], 3 * 4),
        (["b"], ["a_0", "c"], {"data": (2, 3, 4), "b": (3, 3, 4)}, ["a_0", "c"], 10 * 4),
        (["c"], ["out", "d"], {"c": (3, 3, 4)}, ["out", "d"], 3 * 4),
    ):
        result = apply_passes(*files, start=start, end=end)
        assert result.verify(worker=worker).ok
        saved = result.save(tmp_path / "cut")
        assert saved.bin.stat().st_size == size
        runner = NcnnRunner(saved.param, saved.bin, worker=worker)
        assert sorted(runner.input_names()) == sorted(inputs)
        assert sorted(runner.output_names()) == sorted(outputs)
        assert dict(result.shapes) == inputs
        header = saved.param.read_text().split("\n")
        assert int(header[1].split()[0]) == len(header) - 3


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [
        (["nothing"], [], "--start nothing: the net has no blob of that name"),
        ([], ["nothing"], "--end nothing: the net has no blob of that name"),
        (["b"], ["b"], "'b' cannot be both start and end"),
        (["out"], ["b"], "--start out: the net does not need it to compute b"),
        ([], ["data"], "--end data: this is an input of the net, so there is nothing to compute"),
    ],
)
def test_impossible_cuts(tmp_path: Path, start: Sequence[str], end: Sequence[str], message: str) -> None:
    files = write_net(tmp_path, INPUT, "AbsVal a 1 1 data b", "ReLU r 1 1 b out")
    with pytest.raises(UsageError, match=message):
        apply_passes(*files, start=start, end=end)


def test_a_net_that_ncnn_does_not_load_is_reported(tmp_path: Path, worker: NcnnWorker) -> None:
    lines = "Input data 0 1 data 0=4", "Unheard u 1 1 data out"
    result = apply_passes(*write_net(tmp_path, *lines))
    with pytest.raises(RunError, match="cannot run the original net"):
        result.verify(worker=worker)


def test_inputs_of_tables_are_indexes(tmp_path: Path, worker: NcnnWorker) -> None:
    lines = (
        "Input data 0 1 data 0=6",
        "Reshape p 1 1 data a 0=-1",
        "Embed e 1 1 a b 0=4 1=10 3=40",
        "ReLU r 1 1 b out",
    )
    result = apply_passes(*write_net(tmp_path, *lines, weights=tagged(values(40))))
    report = result.verify(worker=worker)
    assert report.ok
    saved = result.save(tmp_path / "out")
    feeds = {"data": np.arange(6, dtype=np.int32)}
    out = NcnnRunner(saved.param, saved.bin, exact=True, worker=worker).run(feeds)["out"]
    assert np.array_equal(out, np.maximum(values(40).reshape(10, 4)[:6], 0))


@pytest.mark.parametrize(
    ("layer", "change", "message"),
    [
        ("Bias l 1 1 data out 0=2", {"bias_data": 1.01}, "off by"),
        # A branch that only large numbers reach; 1 at 0 as well; any entry of a table.
        ("Clip l 1 1 data out 0=-20 1=20", {"max": 1000.0}, "at seed 0, large: off by"),
        ("Threshold l 1 1 data out 0=0", {"threshold": -1e-6}, ""),
        ("Embed l 1 1 data out 0=4 1=70 3=280", {"weight_data": np.where(np.arange(280) == 4 * 33, 50, 1)}, ""),
    ],
)
def test_a_wrong_rewrite_is_caught(
    tmp_path: Path, worker: NcnnWorker, layer: str, change: dict[str, Any], message: str
) -> None:
    source = "Input data 0 1 data 0=6" if "Embed" in layer else "Input data 0 1 data 0=40 1=3 2=2"
    result = apply_passes(*write_filled(tmp_path, source, layer))
    assert result.verify(worker=worker).ok
    changed = result.graph.layers[1]
    for name, value in change.items():
        if name in changed.weights:
            changed.weights[name] = changed.weights[name] * np.float32(value)
        else:
            changed.params[name] = value
    (output,) = result.verify(worker=worker).outputs
    assert output.status == "mismatch"
    assert message in output.message


def test_two_nets_that_give_only_nan_prove_nothing(tmp_path: Path, worker: NcnnWorker) -> None:
    weights = raw(np.full(2, np.nan, np.float32))
    result = apply_passes(*write_net(tmp_path, INPUT, "Bias i 1 1 data out 0=2", weights=weights))
    report = result.verify(worker=worker)
    assert [(output.status, output.cosine, output.max_abs) for output in report.outputs] == [("unproven", None, None)]
    with pytest.raises(VerificationError, match="NaN before as well as after, which proves nothing"):
        report.check()


def test_other_sizes_than_the_stated_ones(tmp_path: Path, worker: NcnnWorker) -> None:
    """An Input's sizes are hints; what is made of the net has to take other images too."""
    lines = (
        "Input data 0 1 data 0=4 1=4 2=2",
        'Reshape a 1 1 data a 6="0w,0h,0c"',
        "Interp b 1 1 a b 0=1 3=4 4=4",
        "Pooling p 1 1 b c 0=1 7=1 8=4 18=4",
        "Crop d 1 1 c out -23309=2,0,0 -23310=2,4,4 -23311=2,1,2",
    )
    files = write_net(tmp_path, *lines)
    result = apply_passes(*files)
    assert result.verify(worker=worker).ok
    saved = result.save(tmp_path / "out")
    feeds = {"data": values(2, 6, 5)}
    before, after = (NcnnRunner(*paths, exact=True, worker=worker) for paths in (files, (saved.param, saved.bin)))
    assert np.array_equal(before.run(feeds)["out"], after.run(feeds)["out"])


def test_a_part_of_rows_of_a_dynamic_size(tmp_path: Path, worker: NcnnWorker) -> None:
    """What looks like the cell of a recurrent layer is a part of what is not known."""
    lines = (
        "Input x 0 1 x 0=3 1=1 2=6",
        "Crop c 1 1 x c -23309=1,0 -23310=1,1 -23311=1,0",
        "Slice s 1 2 c s t -23300=2,2,1 1=2",
        "TanH y 1 1 s y",
        "TanH z 1 1 t z",
    )
    result = apply_passes(*write_net(tmp_path, *lines))
    check_same(result, worker)
    assert "Slice" in [layer.type for layer in result.graph]
