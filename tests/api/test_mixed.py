from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.api.mixed import DeviceJudge, choose_masks, mixed
from onnx2ncnn_opt.cli.main import main
from onnx2ncnn_opt.errors import UsageError, VerificationError
from onnx2ncnn_opt.ir.features import FP32, Feature
from onnx2ncnn_opt.ir.shapes import infer_graph
from onnx2ncnn_opt.param.files import read_net
from onnx2ncnn_opt.precision.fp16_run import Estimator
from onnx2ncnn_opt.precision.mask_judge import MaskJudge, Masks, Measured
from onnx2ncnn_opt.runtime.base import Feed
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from onnx2ncnn_opt.verification.options import Verification
from testing.models import write_model


def saved(folder: Path, graph: str, **weights: Any) -> tuple[Path, ...]:
    """A model and its net, without masks."""
    path = write_model(folder, graph, **weights)
    files = lower(path, masks=False).save(folder / "net")
    return path, files.param, files.bin


@pytest.fixture
def convolutions(tmp_path: Path) -> tuple[Path, ...]:
    """A 1x1 convolution, which costs little, and a 3x3 one, which costs eight percent because of winograd."""
    rng = np.random.default_rng(0)
    graph = (
        "(float[1, 32, 18, 18] x) => (float[A, B, C, D] y)"
        "{ [small] h = Conv(x, a) [large] y = Conv<pads = [1, 1, 1, 1]>(h, b) }"
    )
    a = (rng.standard_normal((32, 32, 1, 1)) / 6).astype(np.float32)
    return saved(tmp_path, graph, a=a, b=(rng.standard_normal((32, 32, 3, 3)) / 17).astype(np.float32))


def test_the_mildest_mask_on_the_layer_that_costs_most(convolutions: tuple[Path, ...]) -> None:
    result = mixed(*convolutions, verification=Verification(budget=1e-2))
    assert [(mask.layer, mask.features) for mask, _ in result.masks] == [("large", Feature.NO_WINOGRAD)]
    assert result.before > 1e-2 >= result.after
    assert result.checked == "estimated for fp16"
    assert {layer.name: layer["featmask"] for layer in result.graph} == {"x": 0, "small": 0, "large": 64}


def test_no_masks_if_none_is_needed(convolutions: tuple[Path, ...]) -> None:
    result = mixed(*convolutions, verification=Verification(budget=0.5))
    assert result.masks == ()
    assert result.before == result.after < 0.5


def test_a_kernel_that_is_wrong_on_arm_is_masked_at_any_budget(tmp_path: Path) -> None:
    options = "group = 8, strides = [2, 2], pads = [1, 1, 1, 1]"
    graph = f"(float[1, 8, 12, 12] x) => (float[A, B, C, D] y) {{ [strided] y = Conv<{options}>(x, w) }}"
    weight = np.random.default_rng(0).standard_normal((8, 1, 3, 3)).astype(np.float32)
    result = mixed(*saved(tmp_path, graph, w=weight), verification=Verification(budget=0.5))
    ((mask, _),) = result.masks
    assert (mask.layer, mask.features) == ("strided", Feature.NO_FP16_ARITHMETIC)


def test_a_budget_that_only_32_bits_keep(convolutions: tuple[Path, ...]) -> None:
    result = mixed(*convolutions, verification=Verification(budget=1e-6))
    assert {mask.layer: mask.features for mask, _ in result.masks} == {"small": FP32, "large": FP32}
    assert result.after <= 1e-6
    with pytest.raises(UsageError, match="above 0"):
        mixed(*convolutions, verification=Verification(budget=0.0))


def test_blocks_in_32_bits_keep_proved_masks(tmp_path: Path) -> None:
    """A number that stands for infinity is infinite in bf16 as well."""
    graph = (
        "(float[1, 4, 8] x) => (float[1, 4, 8] y, float[1, 4, 8] z) <float k = {3.4028235e38}, float one = {1}>"
        "{ r = Relu(x) [large] l = Mul(r, k) y = Min(l, one) z = Sigmoid(x) }"
    )
    result = mixed(*saved(tmp_path, graph), verification=Verification(budget=1e-6))
    masks = {mask.layer: mask.features for mask, _ in result.masks}
    assert masks["large"] == FP32 | Feature.NO_BF16_STORAGE
    assert masks["z"] == FP32


class FaultyDevice(MaskJudge):
    """A device that is off by a hundredth, whatever the masks are."""

    def errors(self, masks: Masks = MappingProxyType({})) -> Measured:
        return {blob: (error + size / 100, size) for blob, (error, size) in super().errors(masks).items()}


def test_a_budget_that_no_masks_keep(convolutions: tuple[Path, ...]) -> None:
    graph = read_net(convolutions[1], convolutions[2]).graph
    infer_graph(graph)
    x = np.random.default_rng(0).standard_normal((32, 18, 18), np.float32)
    with (
        Estimator(graph, {graph.inputs[0]: Feed(x)}) as estimate,
        pytest.raises(VerificationError, match=r"no masks keep the net within 5\.0e-03: .* off by 1\.\de-02"),
    ):
        choose_masks(FaultyDevice(estimate), budget=5e-3)


def test_numbers_that_are_too_large(tmp_path: Path) -> None:
    graph = (
        "(float[1, 4, 8] x) => (float[1, 4, 8] y) <float k = {500}, float one = {1}> { [mul] m = Mul(x, k) "
        "[exp] e = Exp(x) [square] s = Mul(m, m) [more] t = Add(s, one) [root] r = Sqrt(t) [sum] y = Add(r, e) }"
    )
    files = saved(tmp_path, graph)
    result = mixed(*files)
    assert np.isnan(result.before)
    assert result.after < 1e-2
    masks = {mask.layer: mask.features for mask, _ in result.masks}
    assert masks == dict.fromkeys(["square", "more", "root"], FP32)


def test_a_net_that_is_wrong_in_fp32_is_reported(convolutions: tuple[Path, ...]) -> None:
    model, param, bin = convolutions
    data = np.fromfile(bin, np.float32)
    data[10] += 1
    data.tofile(bin)
    with pytest.raises(VerificationError, match="in fp32 already"):
        mixed(model, param, bin)


def test_the_command(convolutions: tuple[Path, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["mixed", *map(str, convolutions), "-o", str(tmp_path / "out"), "--budget", "1e-2"]
    assert main(arguments) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"ok: {tmp_path / 'out.param'} is off by ")
    assert said[0].endswith("; 1.0e-02 is allowed (estimated for fp16)")
    assert said[1].startswith("mask: Convolution 'large': no winograd: winograd's sums in fp16 make errors of ")
    assert said[2] == "masks: 1"
    masks = [layer["featmask"] for layer in read_net(tmp_path / "out.param", tmp_path / "out.bin").graph]
    assert masks == [0, 0, 64]
    data = np.fromfile(convolutions[2], np.float32)
    data[10] += 1
    data.tofile(convolutions[2])
    assert main([*arguments[:-1], "1e-6", "-o", str(tmp_path / "none")]) == 3
    assert not (tmp_path / "none.param").exists()
    assert main([*arguments[:-4], "-o", str(tmp_path / "net.ncnn.param")]) == 2


def test_on_a_device_masks_come_to_the_proved_ones(convolutions: tuple[Path, ...], tmp_path: Path) -> None:
    _, param, bin = convolutions
    net = read_net(param, bin)
    infer_graph(net.graph)
    large = next(layer for layer in net.graph if layer.name == "large")
    feeds = {net.graph.inputs[0]: Feed(np.ones((32, 18, 18), np.float32))}
    with Estimator(net.graph, feeds) as estimator, NcnnWorker() as worker:
        judge = DeviceJudge(estimator, worker, tmp_path)
        with judge.added({large: Feature.NO_WINOGRAD}):
            judge.errors({large: Feature.NO_FP16_ARITHMETIC})
    written = {layer.name: layer["featmask"] for layer in read_net(tmp_path / "net.param", bin).graph}
    assert written["large"] == Feature.NO_WINOGRAD | Feature.NO_FP16_ARITHMETIC
