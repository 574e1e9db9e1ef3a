"""Random nets over the layer table: one to four dimensions, shared blobs, outputs inside, constants, broadcasts.

Every layer is drawn with parameters that make sense and kept if the shape rules accept its inputs. Functions with
jumps (Floor, Sign) and those that grow without bound (Exp) are left out: there a difference in the last bit of an input
becomes any difference at all, and says nothing about a rewrite. Comparisons are in guards alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np

from onnx2ncnn_opt.errors import GraphError, ShapeError
from onnx2ncnn_opt.ir.dim import known
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.param.binary import weight_blocks

INPUTS = ((6,), (12,), (5, 6), (4, 8), (4, 5, 6), (8, 4, 4), (4, 6, 6), (1, 6, 8), (3, 2, 4, 4), (4, 2, 3, 4))
LENGTHS = range(1, 34)  # of a row: whole packs of 4, 8 and 16, and what is left over
LARGEST = 4000  # elements of a blob

Params = dict[str, Any]
Draw = Callable[[Random, Sequence[int]], "Params | None"]
Step = tuple[str, tuple[int, ...], Params]

HALVES: Params = {"op_type": 1, "coeffs": (0.5, 0.5)}


def _none(rng: Random, shape: Sequence[int]) -> Params:
    return {}


def _axis(rng: Random, shape: Sequence[int]) -> int:
    return rng.randrange(-len(shape), len(shape))


def _activation(rng: Random) -> Params:
    kind = rng.choice((0, 0, 0, 1, 2, 3, 4, 5, 6))
    params = {2: (0.1,), 3: (-0.5, 1.0), 6: (1 / 6, 0.5)}.get(kind, ())
    return {"activation_type": kind, **({"activation_params": params} if params else {})}


def _conv(dims: int, *, depthwise: bool = False, transposed: bool = False) -> Draw:
    def draw(rng: Random, shape: Sequence[int]) -> Params | None:
        if len(shape) != dims + 1:
            return None
        c = shape[0]
        out = c if depthwise else rng.choice((c, c, 2, 5))
        kernel = rng.choice((1, 2, 3, 3))
        params: Params = {"num_output": out, "kernel_w": kernel, "bias_term": rng.randint(0, 1), **_activation(rng)}
        if rng.random() < 0.5:
            params["pad_left"] = kernel // 2
        if rng.random() < 0.3:
            params["stride_w"] = 2
        elif rng.random() < 0.2:
            params["dilation_w"] = 2
        params["weight_data_size"] = kernel**dims * c * (1 if depthwise else out)
        if depthwise:
            params["group"] = c
        return params

    return draw


def _inner_product(rng: Random, shape: Sequence[int]) -> Params | None:
    if len(shape) == 4:
        return None
    size = shape[-1] if len(shape) == 2 else int(np.prod(shape))
    out = rng.choice((3, 4, 6))
    return {"num_output": out, "bias_term": rng.randint(0, 1), "weight_data_size": out * size, **_activation(rng)}


def _gemm(rng: Random, shape: Sequence[int]) -> Params | None:
    if len(shape) != 2:
        return None
    n = rng.choice((3, 4, 6))
    return {
        "transB": rng.randint(0, 1),
        "constantB": 1,
        "constantN": n,
        "constantK": shape[1],
        **(
            {"constantC": 1, "constant_broadcast_type_C": 4} if rng.randint(0, 1) else {"constant_broadcast_type_C": -1}
        ),
    }


def _pooling(dims: int) -> Draw:
    def draw(rng: Random, shape: Sequence[int]) -> Params | None:
        if len(shape) != dims + 1:
            return None
        if rng.random() < 0.3:
            return {"pooling_type": rng.randint(0, 1), "global_pooling": 1}
        kernel = rng.choice((1, 2, 3))
        pad = {"pad_left": 1} if kernel > 1 and rng.random() < 0.3 else {}
        include = {"avgpool_count_include_pad": rng.randint(0, 1)}
        stride = {"stride_w": rng.choice((1, 2))}
        mode = {"pad_mode": rng.choice((1, 1, 0))}
        return {"pooling_type": rng.randint(0, 1), "kernel_w": kernel, **stride, **mode, **pad, **include}

    return draw


def _channels(name: str, **more: Any) -> Draw:
    return lambda rng, shape: {name: shape[0], **more}


def _scale(rng: Random, shape: Sequence[int]) -> Params:
    return {"scale_data_size": shape[0], "bias_term": rng.randint(0, 1)}


def _norm(rng: Random, shape: Sequence[int]) -> Params | None:
    if shape[-1] < 2:
        return None
    return {"affine_size": shape[-1], "eps": 1e-3, "affine": rng.randint(0, 1)}


def _group_norm(rng: Random, shape: Sequence[int]) -> Params | None:
    return {"group": rng.choice((1, 2)), "channels": shape[0], "eps": 1e-3, "affine": rng.randint(0, 1)}


def _reshape(rng: Random, shape: Sequence[int]) -> Params | None:
    total = int(np.prod(shape))
    sizes = [rng.choice([d for d in range(1, 9) if total % d == 0]) for _ in range(rng.randint(0, 2))]
    if total % int(np.prod(sizes) or 1):
        return None
    sizes = [*sizes, rng.choice((-1, total // int(np.prod(sizes) or 1)))]
    rng.shuffle(sizes)
    return dict(zip({1: "w", 2: "hw", 3: "chw"}[len(sizes)], sizes, strict=True))


def _permute(rng: Random, shape: Sequence[int]) -> Params:
    return {"order_type": rng.randrange({1: 1, 2: 2, 3: 6, 4: 24}[len(shape)])}


def _crop(rng: Random, shape: Sequence[int]) -> Params:
    axis = rng.randrange(len(shape))
    start = rng.randrange(shape[axis])
    end = rng.choice((-233, rng.randint(start + 1, shape[axis])))
    return {"starts": (start,), "ends": (end,), "axes": (axis,)}


def _padding(rng: Random, shape: Sequence[int]) -> Params | None:
    if not 2 <= len(shape) <= 3 or min(shape[-2:]) < 2:
        return None
    kind = rng.choice((0, 0, 0, 1, 2))
    return {
        **{side: rng.randint(0, 1) for side in ("top", "bottom", "left", "right")},
        "type": kind,
        # Not the lowest number: ncnn's Sigmoid is never 0, not even of that.
        "value": 0.0 if kind else rng.choice((0.0, 0.0, 0.5)),
    }


def _interp(rng: Random, shape: Sequence[int]) -> Params | None:
    if len(shape) != 3:
        return None
    scale = rng.choice((1.0, 2.0))
    return {"resize_type": rng.choice((1, 2)), "height_scale": scale, "width_scale": scale}


def _reduction(rng: Random, shape: Sequence[int]) -> Params:
    axes = tuple(sorted(rng.sample(range(len(shape)), rng.randint(1, len(shape)))))
    operation = rng.choice((0, 3, 3, 4, 5))
    return {"operation": operation, "reduce_all": 0, "axes": axes, "keepdims": rng.randint(0, 1), "fixbug0": 1}


def _scalar(rng: Random, shape: Sequence[int]) -> Params:
    return {
        "op_type": rng.choice((0, 1, 2, 2, 4, 5, 7)),
        "with_scalar": 1,
        "b": rng.choice((0.75, -1.25, 2.0, 1.0, 0.0)),
    }


def _clip(rng: Random, shape: Sequence[int]) -> Params:
    low = rng.choice((-1.0, 0.0, -3.4e38))
    return {"min": low, "max": rng.choice((0.5, 6.0, 3.4e38))}


ONE: tuple[tuple[str, Draw], ...] = (
    *(
        (type, _none)
        for type in ("AbsVal", "Sigmoid", "TanH", "Swish", "Mish", "GELU", "Erf", "Flatten", "Noop", "Split")
    ),
    *((type, _none) for type in ("SELU", "HardSwish", "HardSigmoid", "Softplus", "MVN")),
    ("ReLU", lambda rng, shape: {"slope": rng.choice((0.0, 0.0, 0.1))}),
    ("ELU", lambda rng, shape: {"alpha": 0.5}),
    ("Clip", _clip),
    ("Clip", _clip),
    ("Dropout", lambda rng, shape: {"scale": rng.choice((1.0, 0.5))}),
    ("UnaryOp", lambda rng, shape: {"op_type": rng.choice((0, 1, 4, 9, 10, 16))}),
    *((("BinaryOp", _scalar),) * 5),
    ("Softmax", lambda rng, shape: {"axis": _axis(rng, shape), "fixbug0": 1}),
    *((("BatchNorm", _channels("channels", eps=1e-3)),) * 4),
    *((("Scale", _scale),) * 3),
    ("Bias", _channels("bias_data_size")),
    ("PReLU", lambda rng, shape: {"num_slope": rng.choice((1, shape[0]))}),
    ("LayerNorm", _norm),
    ("RMSNorm", _norm),
    ("GroupNorm", _group_norm),
    (
        "InstanceNorm",
        lambda rng, shape: {"channels": shape[0], "affine": rng.randint(0, 1)} if len(shape) == 3 else None,
    ),
    *((("Convolution", _conv(2)),) * 5),
    *((("ConvolutionDepthWise", _conv(2, depthwise=True)),) * 3),
    ("Deconvolution", _conv(2, transposed=True)),
    ("DeconvolutionDepthWise", _conv(2, depthwise=True, transposed=True)),
    *((("Convolution1D", _conv(1)),) * 3),
    ("ConvolutionDepthWise1D", _conv(1, depthwise=True)),
    ("Deconvolution1D", _conv(1, transposed=True)),
    *((("Convolution3D", _conv(3)),) * 2),
    ("ConvolutionDepthWise3D", _conv(3, depthwise=True)),
    *((("InnerProduct", _inner_product),) * 4),
    *((("Gemm", _gemm),) * 3),
    *((("Pooling", _pooling(2)),) * 2),
    ("Pooling1D", _pooling(1)),
    ("Pooling3D", _pooling(3)),
    *((("Reshape", _reshape),) * 5),
    *((("Permute", _permute),) * 5),
    ("Squeeze", lambda rng, shape: {"axes": (_axis(rng, shape),)}),
    ("ExpandDims", lambda rng, shape: {"axes": (rng.randrange(-len(shape) - 1, len(shape) + 1),)}),
    ("Crop", _crop),
    ("Padding", _padding),
    ("Interp", _interp),
    ("Reduction", _reduction),
    ("PixelShuffle", lambda rng, shape: {"upscale_factor": rng.choice((1, 2)), "mode": rng.randint(0, 1)}),
    ("ShuffleChannel", lambda rng, shape: {"group": 2, "reverse": rng.randint(0, 1)}),
    ("Reorg", lambda rng, shape: {"stride": 2, "mode": rng.randint(0, 1)}),
    ("Tile", lambda rng, shape: {"axis": rng.randrange(len(shape)), "tiles": rng.choice((1, 2))}),
    ("CumulativeSum", lambda rng, shape: {"axis": _axis(rng, shape)}),
    ("Flip", lambda rng, shape: {"axes": (rng.randrange(len(shape)),)}),
)


def _number(op_type: int, b: float, of: int) -> Step:
    return "BinaryOp", (of,), {"op_type": op_type, "with_scalar": 1, "b": b}


def _function(op_type: int, of: int) -> Step:
    return "UnaryOp", (of,), {"op_type": op_type}


def _operation(op_type: int, *of: int) -> Step:
    return "BinaryOp", of, {"op_type": op_type}


def _above(low: float, of: int) -> Step:
    return _number(4, low, of)


def _over_rows(operation: int) -> Step:
    return "Reduction", (0,), {"operation": operation, "reduce_all": 0, "axes": (-1,), "keepdims": 1, "fixbug0": 1}


# What is written out: layers with their operands, where 0 is x and others are the results so far.
WRITTEN_OUT: tuple[tuple[Step, ...], ...] = (
    (
        _number(2, 0.5, 0),
        ("TanH", (1,), {}),
        _number(0, 1.0, 2),
        ("BinaryOp", (0, 3), {"op_type": 2}),
        _number(2, 0.5, 4),
    ),
    (_number(3, 1.41421, 0), ("Erf", (1,), {}), ("BinaryOp", (2, 0), {"op_type": 2}), ("Eltwise", (3, 0), HALVES)),
    (
        _number(0, 3.0, 0),
        _number(3, 6.0, 1),
        ("Clip", (2,), {"min": 0.0, "max": 1.0}),
        ("BinaryOp", (0, 3), {"op_type": 2}),
    ),
    (("Sigmoid", (0,), {}), _number(2, 2.0, 1), _number(1, 1.0, 2)),
    (("AbsVal", (0,), {}), ("Eltwise", (1, 0), HALVES)),
    (("AbsVal", (0,), {}), ("BinaryOp", (1, 0), {"op_type": 0}), _number(2, 0.75, 2)),
    (_over_rows(8), ("Clip", (1,), {"min": 1e-12, "max": 3.4e38}), ("BinaryOp", (0, 2), {"op_type": 3})),
    (_over_rows(4), ("BinaryOp", (0, 1), {"op_type": 1}), ("Softmax", (2,), {"axis": -1, "fixbug0": 1})),
)

ADD, SUB, MUL, DIV, MIN, POW, RSUB = 0, 1, 2, 3, 5, 6, 7
SQRT, RSQRT, LOG, RECIPROCAL = 5, 6, 8, 15
_SIGN_BIT: Step = ("Threshold", (0,), {"threshold": 0.0})
# Functions that are not finite everywhere, guarded as nets without a select do it.
GUARDS: tuple[tuple[Step, ...], ...] = (
    (("AbsVal", (0,), {}), _above(0.1, 1), _operation(DIV, 0, 2)),
    (_operation(MUL, 0, 0), _number(ADD, 0.01, 1), _operation(DIV, 0, 2)),
    (_above(0.0, 0), _number(ADD, 0.01, 1), _function(SQRT, 2), _operation(MUL, 0, 3)),
    (("AbsVal", (0,), {}), _number(ADD, 0.01, 1), _function(RSQRT, 2), _operation(MUL, 0, 3)),
    (("AbsVal", (0,), {}), _above(0.25, 1), _function(RECIPROCAL, 2)),
    (("ReLU", (0,), {}), _number(ADD, 0.1, 1), _number(POW, 0.3, 2)),
    (_above(0.01, 0), _function(LOG, 1)),
    # log(x) where x is above 0, as the logarithm of 1 elsewhere
    (_SIGN_BIT, _operation(MUL, 0, 1), _number(RSUB, 1.0, 1), _operation(ADD, 2, 3), _function(LOG, 4)),
    # smooth L1, and the focal loss
    (
        ("AbsVal", (0,), {}),
        _number(MIN, 1.0, 1),
        _number(MUL, 0.5, 2),
        _operation(SUB, 1, 3),
        _operation(MUL, 2, 4),
    ),
    (
        ("Sigmoid", (0,), {}),
        ("Clip", (1,), {"min": 0.001, "max": 0.999}),
        _function(LOG, 2),
        _number(RSUB, 1.0, 2),
        _operation(MUL, 4, 4),
        _operation(MUL, 5, 3),
        _number(MUL, -1.0, 6),
    ),
)
# And not guarded: x / x, the root, x * log|x|. What layers make of NaN depends on the machine, so none reads these.
NOT_FINITE: tuple[tuple[Step, ...], ...] = (
    (_operation(DIV, 0, 0),),
    (_function(SQRT, 0),),
    (("AbsVal", (0,), {}), ("Log", (1,), {}), _operation(MUL, 0, 2)),
)


class RandomNet:
    """A graph, grown layer by layer; the seed is all it depends on."""

    def __init__(self, seed: int) -> None:
        self.rng, self.bits = Random(seed), np.random.default_rng(seed)
        self.graph, self.blobs, self.ends = Graph(), list[Blob](), list[Blob]()
        for _ in range(self.rng.choice((1, 1, 2))):
            shape = self.rng.choice(INPUTS)
            if self.rng.random() < 0.4:
                shape = (*shape[:-1], self.rng.choice(LENGTHS))
            axes = {1: "w", 2: "hw", 3: "chw", 4: "cdhw"}[len(shape)]
            self.add("Input", [], dict(zip(axes, shape, strict=True)))
        size = self.rng.randint(1, 16)
        while len(self.graph) < size + 2:
            self.grow()
        free = [blob for blob in self.blobs if not blob.uses and not blob.is_input]
        inner = [blob for blob in self.blobs if not blob.is_input and self.rng.random() < 0.06]
        self.graph.outputs = [*free, *inner, *self.ends]

    def grow(self) -> None:
        rng = self.rng
        x = self.pick()
        kind = rng.random()
        if kind < 0.1:
            self.add("BinaryOp", self.operands(x), {"op_type": rng.choice((0, 1, 2, 2, 4, 5, 7))})
        elif kind < 0.2:
            others = [blob for blob in self.blobs if blob.shape == x.shape]
            if rng.random() < 0.4:
                coeffs = rng.choice(((), (0.5, -1.5)))
                self.add("Eltwise", [x, rng.choice(others)], {"op_type": 1, "coeffs": coeffs})
            elif rng.random() < 0.5:
                gate = self.add(rng.choice(("Sigmoid", "HardSigmoid")), [x], {})
                self.add("BinaryOp", rng.sample([x, gate], 2) if gate else [x, x], {"op_type": 2})
            else:
                self.add("Concat", [x, rng.choice(others)], {"axis": rng.randrange(len(x.shape or ()))})
        elif kind < 0.26:
            axis = rng.randrange(len(x.shape or ()))
            self.add("Slice", [x], {"slices": (-233, -233), "axis": axis}, tops=2)
        elif kind < 0.3 and len(x.shape or ()) == 2:
            others = [blob for blob in self.blobs if len(blob.shape or ()) == 2]
            self.add("MatMul", [x, rng.choice(others)], {"transB": rng.randint(0, 1)})
        elif kind < 0.34:
            self.add("Noop", [x, self.pick()], {}, tops=2)
        elif kind < 0.38:
            self.pad(x)
        elif kind < 0.45:
            self.write_out(x, rng.choice(WRITTEN_OUT if kind < 0.41 else GUARDS))
        elif kind < 0.46:
            before = len(self.blobs)
            self.write_out(x, rng.choice(NOT_FINITE))
            self.ends += [blob for blob in self.blobs[before:] if not blob.uses]
            del self.blobs[before:]
        else:
            type, draw = rng.choice(ONE)
            params = draw(rng, [size for size in x.shape or () if isinstance(size, int)])
            if params is not None:
                self.add(type, [x], params)

    def write_out(self, x: Blob, steps: Sequence[Step]) -> None:
        """Add these layers, the first of which reads x."""
        results = [x]
        for type, operands, given in steps:
            results.append(self.add(type, [results[i] for i in operands], given) or x)

    def pad(self, x: Blob | None) -> None:
        """Add a Padding, mostly without negative values, and a layer that may make it needless."""
        rng = self.rng
        draws = {"Padding": _padding, "Crop": _crop, "Pooling": _pooling(2), "Pooling1D": _pooling(1)}
        for type in ("ReLU", "Padding", rng.choice(("Pooling", "Pooling1D", "Padding", "Crop"))):
            if x is None or (type == "ReLU" and rng.random() < 0.3):
                continue
            params = draws[type](rng, known(x.shape or ())) if type in draws else {}
            x = self.add(type, [x], params) if params is not None else x

    def pick(self) -> Blob:
        """Return a blob, mostly a recent one."""
        return self.blobs[-1 - min(int(self.rng.expovariate(0.7)), len(self.blobs) - 1)]

    def operands(self, x: Blob) -> list[Blob]:
        """Return, in any order, the blob and another or a constant: a scalar, a vector for one axis, or its shape."""
        rng = self.rng
        if rng.random() < 0.4:
            others = [blob for blob in self.blobs if blob.shape == x.shape]
            return rng.sample([x, rng.choice(others)], 2)
        shape = [size for size in x.shape or () if isinstance(size, int)]
        kept = rng.choice([(), (0,), (len(shape) - 1,), tuple(range(len(shape)))])
        sizes = [size if axis in kept else 1 for axis, size in enumerate(shape)]
        if rng.random() < 0.3:
            sizes = [shape[0]]
        axes = {1: "w", 2: "hw", 3: "chw", 4: "cdhw"}[len(sizes)]
        constant = self.add("MemoryData", [], dict(zip(axes, sizes, strict=True)))
        return rng.sample([x, constant], 2) if constant else [x, x]

    def add(self, type: str, inputs: Sequence[Blob], params: Params, tops: int = 1) -> Blob | None:
        """Add a layer if its shapes are right; return its first output."""
        number = len(self.graph)
        outputs = [Blob(f"{type.lower()}{number}_{i}" if tops > 1 else f"b{number}") for i in range(tops)]
        layer = Layer(type, f"{type}_{number}", inputs, outputs, params)
        try:
            assign_shapes(layer)
            blocks = weight_blocks(layer)
        except (ShapeError, GraphError):
            return None
        sizes = [int(np.prod(known(blob.shape))) if blob.shape else 0 for blob in outputs]
        if not all(0 < size <= LARGEST for size in sizes):
            return None
        for block in blocks:
            values = self.bits.uniform(0.5, 1.5, block.count)
            if block.name != "var_data":
                values *= self.bits.choice([-1, 1], block.count)
            # Sums of many terms keep the size of one.
            values /= np.sqrt(block.count / 6) if block.name in ("weight_data", "B_data") else 1
            layer.weights[block.name] = values.astype(np.float32)
        self.graph.add(layer)
        self.blobs += outputs
        return outputs[0]
