import numpy as np
import pytest

from onnx2ncnn_opt import passes
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.ir.dim import Shape, symbol
from onnx2ncnn_opt.ir.features import FP32, Feature
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.half import COMPUTED_SIDE
from onnx2ncnn_opt.param.text import format_param
from onnx2ncnn_opt.rewrite.prove_masks import added_inputs, prove_masks, put_masks
from testing.models import parsed
from testing.param_text import bare as net
from testing.param_text import layer


def lines_of(graph: Graph) -> list[str]:
    return [" ".join(line.split()) for line in format_param(graph).splitlines()[2:]]


def test_a_layer_without_fp16_storage_gets_its_inputs_in_32_bits() -> None:
    graph = net("Input x 0 1 x 0=8", "ReLU r 1 1 x a", "UnaryOp s 1 1 a b 0=4", "UnaryOp t 1 1 b y 0=5")
    put_masks(graph, [(layer(graph, name), FP32) for name in "st"])
    assert lines_of(graph) == [
        "Input x 0 1 x 0=8",
        "ReLU r 1 1 x a",
        "Dropout a_fp32 1 1 a a_fp32 31=16",
        "UnaryOp s 1 1 a_fp32 b 0=4 31=19",
        "UnaryOp t 1 1 b y 0=5 31=19",
    ]
    put_masks(graph, [])
    assert len(graph) == 5


def test_a_view_between_two_layers_in_32_bits_is_no_cast() -> None:
    graph = net("Input x 0 1 x 0=8", "ReLU r 1 1 x a", "Reshape v 1 1 a b 0=4 1=2", "UnaryOp s 1 1 b y 0=4")
    put_masks(graph, [(layer(graph, name), FP32) for name in "rs"])
    assert lines_of(graph) == [
        "Input x 0 1 x 0=8",
        "ReLU r 1 1 x a 31=19",
        "Reshape v 1 1 a b 0=4 1=2 31=19",
        "UnaryOp s 1 1 b y 0=4 31=19",
    ]


def test_splits_of_32_bits_keep_them_and_inputs_have_them() -> None:
    graph = net("Input x 0 1 x 0=8", "Split f 1 2 x x0 x1", "UnaryOp s 1 1 x0 b 0=4", "BinaryOp y 2 1 b x1 y 0=0")
    put_masks(graph, [(layer(graph, "s"), FP32)])
    assert lines_of(graph) == [
        "Input x 0 1 x 0=8",
        "Split split_x 1 2 x x_0 x_1 31=19",
        "UnaryOp s 1 1 x_0 b 0=4 31=19",
        "BinaryOp y 2 1 b x_1 y 0=0",
    ]


def test_a_second_run_keeps_masks_and_their_layers() -> None:
    graph = net("Input x 0 1 x 0=8", "ReLU r 1 1 x a", "UnaryOp s 1 1 a b 0=4", "ReLU y 1 1 b y")
    put_masks(graph, [(layer(graph, "s"), FP32)])
    before = lines_of(graph)
    assert passes.run(graph, passes.PASSES) == [] or lines_of(graph) == before
    assert lines_of(graph) == before


def test_no_fusion_of_layers_of_unlike_storage() -> None:
    masks = ((0, 0, 2), (19, 19, 2), (19, 0, 3), (0, 19, 3), (1, 0, 2))
    for first, second, count in masks:
        graph = net(
            "Input x 0 1 x 0=8 1=8 2=3", f"Convolution c 1 1 x a 0=2 1=1 6=6 31={first}", f"ReLU y 1 1 a y 31={second}"
        )
        layer(graph, "c").weights["weight_data"] = np.ones(6, np.float32)
        passes.run(graph, passes.PASSES)
        assert len(graph) == count, (first, second)


def test_masks_that_the_graph_proves() -> None:
    graph = Graph()
    x = graph.add(Layer("Input", "x", (), [Blob("x", (8,))])).output
    sizes, weights = {"num_output": 1, "weight_data_size": 8}, {"weight_data": np.full(8, 7e4, np.float32)}
    large = graph.add(Layer("InnerProduct", "large", [x], [Blob("a", (1,))], sizes, weights))
    added = graph.add(Layer("BinaryOp", "added", [large.output], [Blob("b")], {"with_scalar": 1, "b": 1e-12}))
    root = graph.add(Layer("UnaryOp", "root", [added.output], [Blob("c")], {"op_type": 5}))
    quotient = graph.add(Layer("BinaryOp", "quotient", [x, root.output], [Blob("d")], {"op_type": 3}))
    scaled = graph.add(
        Layer("BinaryOp", "scaled", [quotient.output], [Blob("e")], {"op_type": 2, "with_scalar": 1, "b": 1e5})
    )
    harmless = graph.add(Layer("BinaryOp", "harmless", [scaled.output], [Blob("f")], {"with_scalar": 1, "b": 1e-12}))
    graph.outputs = [harmless.output]
    found = prove_masks(graph)
    assert [each.name for each in found] == ["large", "added", "root", "quotient", "scaled"]
    assert all(mask.features == FP32 for mask in found.values())
    said = "InnerProduct 'large': no fp16 arithmetic, no fp16 storage, no Vulkan: a weight"
    assert str(found[large]).startswith(said)
    put_masks(graph, ((each, mask.features) for each, mask in found.items()))
    assert prove_masks(graph) == {}


@pytest.mark.parametrize(
    ("limit", "user", "count"),
    [
        ("Clip a 1 1 x a 0=1e-12 1=3e38", "Log y 1 1 a y", 2),
        ("BinaryOp a 1 1 x a 0=4 1=1 2=1e-12", "UnaryOp y 1 1 a y 0=15", 2),
        ("Clip a 1 1 x a 0=1e-12 1=3e38", "Log y 1 1 a y 2=1", 0),
        ("Clip a 1 1 x a 0=1e-3 1=1e3", "Log y 1 1 a y", 0),
        ("Clip a 1 1 x a 0=1e-12 1=1", "ReLU y 1 1 a y", 0),
    ],
)
def test_a_limit_that_keeps_zeros_from_a_logarithm(limit: str, user: str, count: int) -> None:
    graph = net("Input x 0 1 x 0=8 1=8 2=8", limit, user)
    assert [mask.features for mask in prove_masks(graph).values()] == [FP32] * count


def test_a_mask_times_the_lowest_number() -> None:
    graph = Graph()
    x = graph.add(Layer("Input", "x", (), [Blob("x", (8,))])).output
    mask = graph.add(Layer("Threshold", "mask", [x], [Blob("m", (8,))], {"threshold": 1.0})).output
    params = {"op_type": 2, "with_scalar": 1, "b": -3.4028235e38}
    times_low = graph.add(Layer("BinaryOp", "low", [mask], [Blob("y", (8,))], params)).output
    two = {"op_type": 1, "coeffs": (-3.4028235e38, 1.0)}
    total = graph.add(Layer("Eltwise", "sum", [mask, x], [Blob("z", (8,))], two)).output
    scores = graph.add(Layer("BinaryOp", "scores", [x, times_low], [Blob("s", (8,))])).output
    weights = graph.add(Layer("Softmax", "weights", [scores], [Blob("w", (8,))])).output
    graph.outputs = [total, graph.add(Layer("ReLU", "relu", [weights], [Blob("r", (8,))])).output]
    found = list(prove_masks(graph).values())
    assert {mask.features for mask in found} == {FP32 | Feature.NO_BF16_STORAGE}
    own = "one of its numbers is 3.4e+38, which is infinite in fp16"
    row = "it computes with -3.4e+38, which is infinite in fp16"
    assert [(mask.layer, mask.reason == row) for mask in found] == [
        ("low", 0),
        ("scores", 1),
        ("weights", 1),
        ("sum", 0),
    ]
    assert {mask.reason for mask in found} == {own, row}


@pytest.mark.parametrize(
    ("line", "features"),
    [
        ("Normalize y 1 1 x y 2=1e-12 3=1 9=1", Feature.NO_VULKAN),
        ("Normalize y 1 1 x y 2=1e-4 3=1 9=1", 0),
        ("Normalize y 1 1 x y 2=1e-6 3=1", 0),
        ("Normalize y 1 1 x y 2=1e-8 3=1", Feature.NO_VULKAN),
        ("InstanceNorm y 1 1 x y 0=8 1=1e-12 2=0", FP32),
        ("GroupNorm y 1 1 x y 0=2 1=8 2=1e-12 3=0", Feature.NO_VULKAN),
        ("GroupNorm y 1 1 x y 0=2 1=8 2=1e-5 3=0", 0),
        ("Gemm y 1 1 x y 0=1e5 3=1 5=1 6=1 10=-1 8=8 9=8", FP32),
        ("Gemm y 1 1 x y 3=1 5=1 6=1 10=-1 8=8 9=8 18=2", Feature.NO_VULKAN),
        ("Gemm y 1 1 x y 3=1 5=1 6=1 10=-1 8=8 9=8 18=801", 0),
        ("HardSigmoid y 1 1 x y 0=1e5", FP32),
        ("BinaryOp y 1 1 x y 0=1 1=1 2=1e9", FP32),
        ("BinaryOp y 1 1 x y 0=3 1=1 2=1e-8", FP32),
        ("BinaryOp y 1 1 x y 0=4 1=1 2=-1e9", 0),  # it may keep numbers of x only
    ],
)
def test_numbers_of_layers(line: str, features: int) -> None:
    graph = net("Input x 0 1 x 0=8 1=8 2=8", line)
    assert [mask.features for mask in prove_masks(graph).values()] == [features] * bool(features)


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        (("BinaryOp s 2 1 q m s 0=0", "Softmax y 1 1 s y 0=2 1=1"), []),  # either may be the scores
        (("ReLU r 1 1 q r", "BinaryOp s 2 1 r m s 0=0", "Softmax y 1 1 s y 0=2 1=1"), ["m"]),
        (("Squeeze z 1 1 m z -23303=1,0", "Split k 1 3 q a b c", "SDPA y 4 1 a b c z y 5=1"), ["m"]),
        (("BinaryOp s 2 1 q m s 0=0", "Sigmoid y 1 1 s y"), []),
    ],
)
def test_inputs_that_are_added_to_scores(lines: tuple[str, ...], names: list[str]) -> None:
    graph = net("Input q 0 1 q 0=8 1=8 2=1", "Input m 0 1 m 0=8 1=8 2=1", *lines)
    assert [blob.name for blob in added_inputs(graph)] == names


def test_the_faulty_kernel_is_proved() -> None:
    graph = net(
        "Input x 0 1 x 0=12 1=12 2=8", "ConvolutionDepthWise y 1 1 x y 0=8 1=3 3=2 4=1 6=72 7=8 -23330=4,3,6,6,8"
    )
    layer(graph, "y").output.shape = (8, 6, 6)
    (mask,) = prove_masks(graph).values()
    assert mask.features == Feature.NO_FP16_ARITHMETIC
    assert "wrong row" in mask.reason


@pytest.mark.parametrize(
    ("shape", "order", "is_masked"),
    [
        ((4, 3, 3), 1, True),
        ((8, symbol("h"), symbol("w")), 1, True),
        ((symbol("n"), 45, 3), 1, True),
        ((12, 197, 5), 1, True),
        ((16, 45, 3), 2, False),
        ((8, 7, 8), 1, False),
        ((8, 7, 2 * symbol("w")), 1, False),
        ((6, 7, 7), 1, False),
        ((8, 7), 1, False),
        ((16, 3, 5, 7), 5, True),
        ((16, 3, 5, 7), 6, False),
        ((16, 3, 5, 7), 0, False),
        ((16, 3, 2, 7), 3, False),
        (None, 5, True),
        (None, 6, False),
        (None, 0, False),
    ],
)
def test_permutes_that_gpus_spoil_in_16_bits(shape: Shape | None, order: int, is_masked: bool) -> None:
    graph = net("Input x 0 1 x", f"Permute y 1 1 x y 0={order}")
    layer(graph, "x").output.shape = shape
    masks = prove_masks(graph)
    assert [mask.features for mask in masks.values()] == [Feature.NO_VULKAN] * is_masked
    put_masks(graph, ((each, mask.features) for each, mask in masks.items()))
    assert not prove_masks(graph)


def test_softplus_keeps_its_exp_in_fp32() -> None:
    graph = net("Input x 0 1 x 0=8", "Softplus y 1 1 x y", "Sigmoid s 1 1 y s", "Softplus z 1 1 s z")
    found = prove_masks(graph)
    assert {each.name: mask.features for each, mask in found.items()} == {"y": Feature.NO_FP16_ARITHMETIC}
    one_layer = net("Input x 0 1 x 0=8", "BinaryOp y 1 1 x y 0=14 1=1 2=0.0")
    assert [mask.features for mask in prove_masks(one_layer).values()] == [Feature.NO_FP16_ARITHMETIC]


@pytest.mark.parametrize("counts", [True, False])
def test_a_lookup_at_counted_positions(counts: bool) -> None:
    graph = net(
        "Input x 0 1 x 0=9",
        "MemoryData one 0 1 one 0=2",
        'Interp ones 2 1 one x ones 0=1 9="1w,1"',
        "CumulativeSum c 1 1 ones c 0=2" if counts else "UnaryOp c 1 1 ones c 0=1",
        "Scale s 1 1 c s 0=2 1=1",
        "MemoryData t 0 1 t 0=64 1=1 2=3",
        "GridSample y 2 1 t s y 0=2 1=2 3=1",
    )
    layer(graph, "one").weights["data"] = np.ones(2, np.float32)
    layer(graph, "t").weights["data"] = np.zeros((2, 1, 64), np.float32)
    layer(graph, "s").weights.update(scale_data=np.ones(2, np.float32), bias_data=np.zeros(2, np.float32))
    reason = "it computes with whole numbers, perhaps above 2048"
    masks = [mask.layer for mask in prove_masks(graph).values() if mask.reason == reason]
    assert masks == (["c", "ones", "s"] if counts else [])


def test_a_sine_of_counts_times_frequencies() -> None:
    graph = net(
        "Input x 0 1 x 0=9",
        "MemoryData one 0 1 one 0=1",
        'Interp ones 2 1 one x ones 0=1 9="1w,1"',
        "CumulativeSum c 1 1 ones c 0=2",
        "Reshape r 1 1 c r 0=1 1=-1",
        "Gemm g 1 1 r g 3=1 5=1 8=4 9=1",
        "UnaryOp y 1 1 g y 0=9",
    )
    layer(graph, "one").weights["data"] = np.ones(1, np.float32)
    layer(graph, "g").weights["B_data"] = np.ones(4, np.float32)
    assert {mask.layer for mask in prove_masks(graph).values()} == {"ones", "c", "r", "g", "y"}


@pytest.mark.parametrize(("classes", "masked"), [(21, []), (1500, ["y_5", "y_6"])])
def test_an_index_of_few_classes_is_exact_in_fp16(classes: int, masked: list[str]) -> None:
    text = f"(float[1,{classes},2,2] x) => (int64[1,2,2] y) {{ s = Sigmoid(x) y = ArgMax<axis = 1, keepdims = 0>(s) }}"
    assert sorted(mask.layer for mask in lower(parsed(text, 17)).masks) == masked


def test_a_lookup_in_an_image_whose_centres_fp16_cannot_compute() -> None:
    def reads_its_own_pixel(side: int) -> bool:
        index = np.arange(side)
        centres = np.float16(index) * np.float16(2 / side) + np.float16(1 / side - 1)  # as GPUs, with two roundings
        return np.array_equal(np.rint(((np.float32(centres) + 1) * side - 1) / 2), index)

    assert all(map(reads_its_own_pixel, range(1, COMPUTED_SIDE + 1)))
    side = next(side for side in range(COMPUTED_SIDE, 1024) if not reads_its_own_pixel(side))
    for each in (COMPUTED_SIDE, side):
        graph = net(
            f"Input x 0 1 x 0={each} 1=1 2=4",
            "Input i 0 1 i 0=5 1=1 2=2",
            "UnaryOp k 1 1 i k 0=19",
            "Scale s 1 1 k s 0=2 1=1",
            "GridSample y 2 1 x s y 0=2 1=2 3=1",
        )
        for name, value in (("scale_data", 2 / each), ("bias_data", 1 / each - 1)):
            layer(graph, "s").weights[name] = np.full(2, value, np.float32)
        assert [mask.layer for mask in prove_masks(graph).values()] == ["y", "s", "k"] * (each == side)


def test_a_gemm_that_computes_the_centres_of_an_image() -> None:
    for side in range(1, COMPUTED_SIDE + 1):
        index, half = np.float16(np.arange(side)), np.float16((side - 1) / 2)
        centres = (index - half) * np.float16(2 / side)
        assert np.array_equal(np.rint(((np.float32(centres) + 1) * side - 1) / 2), index)
    for side in (COMPUTED_SIDE, COMPUTED_SIDE + 1):
        graph = net(
            f"Input x 0 1 x 0={side} 1=1 2=4",
            "Input i 0 1 i 0=1 1=5",
            "UnaryOp k 1 1 i k 0=19",
            "Gemm s 1 1 k s 3=1 4=1 6=1 7=2 9=1 11=1",
            "GridSample y 2 1 x s y 0=2 1=2 3=1",
        )
        layer(graph, "s").weights.update(A_data=np.ones(2, np.float32), C_data=np.ones(1, np.float32))
        assert [mask.layer for mask in prove_masks(graph).values()] == ["y", "s", "k"] * (side > COMPUTED_SIDE)
