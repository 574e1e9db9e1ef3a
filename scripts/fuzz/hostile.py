"""Convert broken ONNX models: each must end in a net or in one clear error, within its time and memory.

    python -m scripts.fuzz.hostile [--count 10000] [--seed 0] [--first 0]

Each case is a small model of fixtures/models with one to three mutations: flipped bytes of the file, dropped, doubled,
moved or renamed nodes, swapped operators, changed attributes, lying shapes and types, huge sizes, cycles, external data
that points elsewhere. It is converted (and the net is written) in a child process with an address space of 4 GiB; a
case that takes longer than 20 seconds, dies, or raises anything but an error of the package is a failure.
"""

import argparse
import random
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

import onnx

from scripts.fuzz import campaign
from testing.conformance import Outcome

MODELS = sorted(
    path
    for path in (Path(__file__).parents[2] / "fixtures" / "models").glob("*.onnx")
    if b'{"fill"' not in path.read_bytes()
)
SECONDS = 20
MEMORY = 4 << 30
OPERATORS = (
    *("Add", "AveragePool", "BatchNormalization", "Cast", "Clip", "Concat", "Conv", "ConvTranspose", "DepthToSpace"),
    *("Einsum", "Expand", "Flatten", "Gather", "Gemm", "LSTM", "LayerNormalization", "LeakyRelu", "Loop", "MatMul"),
    *("MaxPool", "Pad", "PRelu", "ReduceMean", "Reshape", "Resize", "Shape", "Slice", "Softmax", "Split", "Squeeze"),
    *("Tile", "TopK", "Transpose", "Unsqueeze", "Upsample", "Where", "NoSuchOperator"),
)
NUMBERS = (-(2**63), -(2**31), -234, -233, -7, -1, 0, 1, 2, 3, 5, 64, 2**16, 2**31 - 1, 2**31, 2**40, 2**62)


def mutate(model: onnx.ModelProto, rng: random.Random) -> None:
    """Change the model's structure once, in place."""
    rng.choice(MUTATIONS)(model, rng)


def _node(model: onnx.ModelProto, rng: random.Random) -> onnx.NodeProto:
    node: onnx.NodeProto = rng.choice(model.graph.node) if model.graph.node else model.graph.node.add(op_type="Relu")
    return node


def _names(model: onnx.ModelProto) -> list[str]:
    nodes = [name for node in model.graph.node for name in (*node.input, *node.output)]
    return [*nodes, *(t.name for t in model.graph.initializer), "", "nowhere"]


def _drop_node(model: onnx.ModelProto, rng: random.Random) -> None:
    if model.graph.node:
        del model.graph.node[rng.randrange(len(model.graph.node))]


def _double_node(model: onnx.ModelProto, rng: random.Random) -> None:
    model.graph.node.add().CopyFrom(_node(model, rng))


def _move_node(model: onnx.ModelProto, rng: random.Random) -> None:
    node = onnx.NodeProto()
    node.CopyFrom(_node(model, rng))
    _drop_node(model, rng)
    model.graph.node.insert(rng.randrange(len(model.graph.node) + 1), node)


def _swap_operator(model: onnx.ModelProto, rng: random.Random) -> None:
    _node(model, rng).op_type = rng.choice(OPERATORS)


def _swap_domain(model: onnx.ModelProto, rng: random.Random) -> None:
    _node(model, rng).domain = rng.choice(("", "ai.onnx", "com.microsoft", "my.domain"))


def _rewire(model: onnx.ModelProto, rng: random.Random) -> None:
    node = _node(model, rng)
    ends = rng.choice((node.input, node.output))
    if ends:
        ends[rng.randrange(len(ends))] = rng.choice(_names(model))


def _more_or_fewer_inputs(model: onnx.ModelProto, rng: random.Random) -> None:
    node = _node(model, rng)
    if rng.random() < 0.5 and node.input:
        node.input.pop()
    else:
        node.input.append(rng.choice(_names(model)))


def _change_attribute(model: onnx.ModelProto, rng: random.Random) -> None:
    node = _node(model, rng)
    if not node.attribute or rng.random() < 0.2:
        node.attribute.append(onnx.helper.make_attribute(rng.choice(("axis", "axes", "mode", "strange")), 3))
        return
    attribute = rng.choice(node.attribute)
    if attribute.ints and rng.random() < 0.7:
        attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(NUMBERS)
    elif rng.random() < 0.3:
        del attribute.ints[:]
    else:
        attribute.i, attribute.f = rng.choice(NUMBERS), rng.choice((0.0, -1.0, 1e38, float("nan"), float("inf")))
        attribute.s = rng.choice((b"", b"reflect", b"\xff\xfe", b"SAME_UPPER"))
    if rng.random() < 0.2:
        attribute.type = rng.choice(list(onnx.AttributeProto.AttributeType.values()))


def _change_constant(model: onnx.ModelProto, rng: random.Random) -> None:
    """Put other values of the right size into a small integer constant: shapes, axes, pads."""
    small = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.INT64 and len(t.raw_data) <= 128]
    small += [a.t for n in model.graph.node for a in n.attribute if a.HasField("t") and len(a.t.raw_data) <= 128]
    if small:
        tensor = rng.choice(small)
        count = len(tensor.raw_data) // 8
        values = [rng.choice(NUMBERS) if rng.random() < 0.5 else rng.randrange(-4, 9) for _ in range(count)]
        tensor.raw_data = b"".join(v.to_bytes(8, "little", signed=True) for v in values) or tensor.raw_data


def _lie_about_dims(model: onnx.ModelProto, rng: random.Random) -> None:
    if model.graph.initializer:
        tensor = rng.choice(model.graph.initializer)
        if tensor.dims and rng.random() < 0.8:
            tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(NUMBERS)
        else:
            tensor.dims.append(rng.choice(NUMBERS))


def _lie_about_type(model: onnx.ModelProto, rng: random.Random) -> None:
    if model.graph.initializer:
        rng.choice(model.graph.initializer).data_type = rng.randrange(30)


def _lie_about_input(model: onnx.ModelProto, rng: random.Random) -> None:
    tensor = rng.choice(model.graph.input).type.tensor_type
    if rng.random() < 0.3:
        tensor.elem_type = rng.randrange(30)
    elif tensor.shape.dim and rng.random() < 0.8:
        dim = rng.choice(tensor.shape.dim)
        if rng.random() < 0.3:
            dim.dim_param = rng.choice(("n", "h", "2*h", ""))
        else:
            dim.dim_value = rng.choice(NUMBERS)
    else:
        tensor.shape.dim.add(dim_value=rng.choice(NUMBERS))


def _point_outside(model: onnx.ModelProto, rng: random.Random) -> None:
    if model.graph.initializer:
        tensor = rng.choice(model.graph.initializer)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.ClearField("raw_data")
        for key, value in (
            ("location", rng.choice(("../secret", "/etc/passwd", "model.onnx", "nothing", "a\0b", ""))),
            ("offset", str(rng.choice(NUMBERS))),
            ("length", str(rng.choice(NUMBERS))),
        ):
            if rng.random() < 0.8:
                tensor.external_data.add(key=key, value=value)


def _change_opset(model: onnx.ModelProto, rng: random.Random) -> None:
    model.opset_import[0].version = rng.choice((0, 1, 6, 7, 9, 11, 13, 17, 20, 23, 27, 99, -1))


def _drop_outputs(model: onnx.ModelProto, rng: random.Random) -> None:
    if rng.random() < 0.5:
        del model.graph.output[:]
    else:
        model.graph.output.add(name=rng.choice(_names(model)))


MUTATIONS: tuple[Callable[[onnx.ModelProto, random.Random], None], ...] = (
    *(_drop_node, _double_node, _move_node, _swap_operator, _swap_domain, _rewire, _more_or_fewer_inputs),
    *(_change_attribute, _change_attribute, _change_constant, _change_constant, _lie_about_dims, _lie_about_type),
    *(_lie_about_input, _point_outside, _change_opset, _drop_outputs),
)


def make(number: int, seed: int) -> bytes:
    """Return the bytes of case `number`."""
    rng = random.Random(f"{seed}/{number}")
    data = rng.choice(MODELS).read_bytes()
    if rng.random() < 0.25:
        broken = bytearray(data)
        for _ in range(rng.choice((1, 2, 20))):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        return bytes(broken[: rng.randrange(len(broken))] if rng.random() < 0.3 else broken)
    model = onnx.ModelProto.FromString(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        mutate(model, rng)
    return bytes(model.SerializeToString())


def child(given: argparse.Namespace) -> None:
    """Convert a run of cases."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("error")
    from onnx2ncnn_opt.api.lower import lower
    from onnx2ncnn_opt.errors import ConversionError, UsageError

    def too_long(*_: object) -> None:
        raise TimeoutError

    def judge(number: int) -> Outcome:
        path.unlink(missing_ok=True)  # a thread may still read the one before
        path.write_bytes(make(number, given.seed))
        signal.alarm(SECONDS)
        try:
            lower(path).save(path.with_name("net"))
            return Outcome("converted")
        except (ConversionError, UsageError) as error:
            return Outcome(type(error).__name__, str(error).splitlines()[0][:120])
        except BaseException:
            return Outcome("FAILED", traceback.format_exc(limit=-3).replace("\n", " | ")[-600:])
        finally:
            signal.alarm(0)

    signal.signal(signal.SIGALRM, too_long)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        campaign.answer(given, judge)


def main() -> int:
    """Run the command line."""
    given = campaign.arguments(__doc__, 10_000).parse_args()
    if given.child:
        child(given)
        return 0
    return campaign.report(
        campaign.in_children("scripts.fuzz.hostile", campaign.numbers(given), ["--seed", str(given.seed)])
    )


if __name__ == "__main__":
    sys.exit(main())
