"""Matrix products."""

from itertools import zip_longest

from onnx2ncnn_opt.ir.codes import GemmC
from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, product
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.shapes.registry import broadcast, differ, equal, fail, need_rank, shape_of


@shape_of("InnerProduct")
def inner_product(layer: Layer, x: Shape) -> Shape | None:
    """Return (num_output), or (h, num_output) for a 2-D blob whose rows have the weights' size."""
    outputs = layer["num_output"]
    if outputs < 1 or layer["weight_data_size"] % outputs:
        fail(layer, f"weight_data_size {layer['weight_data_size']} is not a multiple of num_output {outputs}")
    size = layer["weight_data_size"] // outputs
    if len(x) == 2 and isinstance(x[1], Sym):
        return None  # whole rows, or everything flattened: the width decides
    if len(x) == 2 and x[1] == size:
        return x[0], outputs
    equal(layer, size, product(x), "the inputs of the weights and the elements of the blob")
    return (outputs,)


@shape_of("MatMul")
def matmul(layer: Layer, a: Shape, b: Shape) -> Shape:
    """Return numpy.matmul's shape; (1) for two vectors. transB swaps the last two axes of b unless it is a vector."""
    left = (1, *a) if len(a) == 1 else a
    right = (*b, 1) if len(b) == 1 else b
    if layer["transB"] and len(b) > 1:
        right = (*right[:-2], right[-1], right[-2])
    equal(layer, left[-1], right[-2], "the inner sizes")
    outer = [
        broadcast(layer, m, n, "outer sizes (or one of them 1)")
        for m, n in zip_longest(left[-3::-1], right[-3::-1], fillvalue=1)
    ]
    rows = left[-2:-1] if len(a) > 1 else ()
    columns = right[-1:] if len(b) > 1 else ()
    return (*reversed(outer), *rows, *columns) or (1,)


@shape_of("Gemm")
def gemm(layer: Layer, *inputs: Shape) -> Shape:
    """Return (M, N): (N, M) with output_transpose, and a 1 between them with output_N1M."""
    dynamic = list(inputs)
    matrices: list[Shape] = []
    for name, constant, (rows, columns) in (("A", "constantA", "MK"), ("B", "constantB", "KN")):
        swapped = layer[f"trans{name}"]
        if layer[constant]:
            matrices.append((layer[f"constant{rows}"], layer[f"constant{columns}"]))
        elif dynamic:
            matrix = _matrix(layer, dynamic.pop(0))
            matrices.append((matrix[1], matrix[0]) if swapped else matrix)
        else:
            fail(layer, f"{name} is not constant, and there is no input for it")
    (m, k), (k2, n) = matrices
    equal(layer, k, k2, "the inner sizes K of A and B")
    if layer["constantC"]:
        kind = layer["constant_broadcast_type_C"]
        if kind in (GemmC.M, GemmC.M_1, GemmC.M_N):
            equal(layer, layer["constantM"], m, "constantM, which C has, and the rows of the result")
        if kind in (GemmC.M_N, GemmC.N):
            equal(layer, layer["constantN"], n, "constantN, which C has, and the columns of the result")
    elif dynamic:
        _check_c(layer, dynamic.pop(0), (m, n))
    if dynamic:
        fail(layer, "it has more inputs than matrices")
    rows_first = (n, m) if layer["output_transpose"] else (m, n)
    return (rows_first[0], 1, rows_first[1]) if layer["output_N1M"] else rows_first


def _matrix(layer: Layer, x: Shape) -> Shape:
    """Return a blob as Gemm reads it: a vector is one row, and the rows of a 3-D blob are along c."""
    need_rank(layer, x, 1, 2, 3)
    if len(x) == 1:
        return 1, x[0]
    if len(x) == 3:
        equal(layer, x[1], 1, "the height of a 3-D blob, whose rows are along c, and 1:")
        return x[0], x[2]
    return x


def _check_c(layer: Layer, c: Shape, result: Shape) -> None:
    """Check the shape of C: for an unknown shape ncnn adds only the first element."""
    m, n = result
    fitting: tuple[Shape, ...] = ((1,), (m,), (n,), (m, 1), (m, n), (1, n))
    for shape in fitting:
        if len(shape) == len(c) and not any(differ(a, b) for a, b in zip(shape, c, strict=True)):
            return
    fail(layer, f"C has a shape that does not broadcast to ({m}, {n})")


@shape_of("Einsum")
def einsum(layer: Layer, *inputs: Shape) -> Shape:
    """Return the sizes of the letters on the right.

    The equation comes as character codes, with i, ij, ijk or ijkl on the right.
    """
    equation = "".join(map(chr, layer["equation"]))
    if equation == "ii":
        need_rank(layer, inputs[0], 2)
        equal(layer, inputs[0][0], inputs[0][1], "the sides of a matrix with a trace")
        return (1,)
    left, arrow, right = equation.partition("->")
    tokens = left.split(",")
    if not arrow or not right or right != "ijkl"[: len(right)] or len(tokens) != len(inputs):
        fail(layer, f"equation '{equation}' for {len(inputs)} inputs")
    sizes: dict[str, Dim] = {}
    for token, shape in zip(tokens, inputs, strict=True):
        need_rank(layer, shape, len(token))
        for letter, size in zip(token, shape, strict=True):
            sizes[letter] = equal(layer, sizes.get(letter, size), size, f"sizes of '{letter}'")
    if not set(right) <= set(sizes):
        fail(layer, f"equation '{equation}' has letters on the right that are not on the left")
    return tuple(sizes[letter] for letter in right)
