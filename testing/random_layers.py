"""Random nets over the layer table: one to four dimensions, shared blobs, outputs inside, constants, broadcasts.

Every layer is drawn with parameters that make sense and kept if the shape rules accept its inputs. Functions with
jumps (Floor, Sign) and those that grow without bound (Exp) are left out: there a difference in the last bit of an input
becomes any difference at all, and says nothing about a rewrite. Comparisons are in guards alone.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np

from onnx2ncnn_opt.errors import GraphError, ShapeError
from onnx2ncnn_opt.ir.dim import known
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.param.binary import weight_blocks
from testing.formulas import evaluate, layer_of

INPUTS = ((6,), (12,), (5, 6), (4, 8), (4, 5, 6), (8, 4, 4), (4, 6, 6), (1, 6, 8), (3, 2, 4, 4), (4, 2, 3, 4))
IMAGE = (4, 5, 6)
LENGTHS = range(1, 34)  # of a row: whole packs of 4, 8 and 16, and what is left over
LARGEST = 4000  # elements of a blob

Params = dict[str, Any]
Draw = Callable[[Random, Sequence[int]], "Params | None"]


def _sizes(shape: Sequence[int]) -> Params:
    return dict(zip({1: "w", 2: "hw", 3: "chw", 4: "cdhw"}[len(shape)], shape, strict=True))


def _axis(rng: Random, shape: Sequence[int]) -> int:
    return rng.randrange(-len(shape), len(shape))


def _activation(rng: Random) -> Params:
    kind = rng.choice((0, 0, 0, 1, 2, 3, 4, 5, 6))
    params = {2: (0.1,), 3: (-0.5, 1.0), 6: (1 / 6, 0.5)}.get(kind, ())
    return {"activation_type": kind, **({"activation_params": params} if params else {})}


def _conv(dims: int, *, depthwise: bool = False) -> Draw:
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
    bias = rng.choice(({"constantC": 1, "constant_broadcast_type_C": 4}, {"constant_broadcast_type_C": -1}))
    sizes = {"constantN": rng.choice((3, 4, 6)), "constantK": shape[1]}
    return {"transB": rng.randint(0, 1), "constantB": 1, **sizes, **bias}


def _pooling(dims: int) -> Draw:
    def draw(rng: Random, shape: Sequence[int]) -> Params | None:
        if len(shape) != dims + 1:
            return None
        params: Params = {"pooling_type": rng.randint(0, 1)}
        if rng.random() < 0.3:
            return params | {"global_pooling": 1}
        kernel = rng.choice((1, 2, 3))
        if kernel > 1 and rng.random() < 0.3:
            params["pad_left"] = 1
        params |= {"kernel_w": kernel, "stride_w": rng.choice((1, 2)), "pad_mode": rng.choice((1, 1, 0))}
        return params | {"avgpool_count_include_pad": rng.randint(0, 1)}

    return draw


def _norm(rng: Random, shape: Sequence[int]) -> Params | None:
    return {"affine_size": shape[-1], "eps": 1e-3, "affine": rng.randint(0, 1)} if shape[-1] > 1 else None


def _group_norm(rng: Random, shape: Sequence[int]) -> Params:
    return {"group": rng.choice((1, 2)), "channels": shape[0], "eps": 1e-3, "affine": rng.randint(0, 1)}


def _instance_norm(rng: Random, shape: Sequence[int]) -> Params | None:
    return {"channels": shape[0], "affine": rng.randint(0, 1)} if len(shape) == 3 else None


def _reshape(rng: Random, shape: Sequence[int]) -> Params | None:
    total = int(np.prod(shape))
    sizes = [rng.choice([d for d in range(1, 9) if total % d == 0]) for _ in range(rng.randint(0, 2))]
    rest, remainder = divmod(total, int(np.prod(sizes) or 1))
    if remainder:
        return None
    sizes.append(rng.choice((-1, rest)))
    rng.shuffle(sizes)
    return _sizes(sizes)


def _crop(rng: Random, shape: Sequence[int]) -> Params:
    axis = rng.randrange(len(shape))
    start = rng.randrange(shape[axis])
    end = rng.choice((-233, rng.randint(start + 1, shape[axis])))
    return {"starts": (start,), "ends": (end,), "axes": (axis,)}


def _padding(rng: Random, shape: Sequence[int]) -> Params | None:
    if not 2 <= len(shape) <= 3 or min(shape[-2:]) < 2:
        return None
    sides = {side: rng.randint(0, 1) for side in ("top", "bottom", "left", "right")}
    kind = rng.choice((0, 0, 0, 1, 2))
    # Not the lowest number: ncnn's Sigmoid is never 0, not even of that.
    return {**sides, "type": kind, "value": 0.0 if kind else rng.choice((0.0, 0.0, 0.5))}


def _interp(rng: Random, shape: Sequence[int]) -> Params | None:
    scale = rng.choice((1.0, 2.0))
    how = {"resize_type": rng.choice((1, 2)), "height_scale": scale, "width_scale": scale}
    return how if len(shape) == 3 else None


def _reduction(rng: Random, shape: Sequence[int]) -> Params:
    axes = tuple(sorted(rng.sample(range(len(shape)), rng.randint(1, len(shape)))))
    operation = rng.choice((0, 3, 3, 4, 5))
    return {"operation": operation, "reduce_all": 0, "axes": axes, "keepdims": rng.randint(0, 1), "fixbug0": 1}


def _scalar(rng: Random, shape: Sequence[int]) -> Params:
    operation, number = rng.choice((0, 1, 2, 2, 4, 5, 7)), rng.choice((0.75, -1.25, 2.0, 1.0, 0.0))
    return {"op_type": operation, "with_scalar": 1, "b": number}


# Types, how often each of them comes, and how its parameters are drawn for an input of some shape.
_ONE: tuple[tuple[str, int, Draw], ...] = (
    ("AbsVal TanH Swish GELU Erf Split SELU HardSigmoid Softplus MVN", 1, lambda rng, shape: {}),
    ("Sigmoid Mish Flatten Noop HardSwish", 1, lambda rng, shape: {}),
    ("ReLU", 1, lambda rng, shape: {"slope": rng.choice((0.0, 0.0, 0.1))}),
    ("ELU", 1, lambda rng, shape: {"alpha": 0.5}),
    ("Clip", 2, lambda rng, shape: {"min": rng.choice((-1.0, 0.0, -3.4e38)), "max": rng.choice((0.5, 6.0, 3.4e38))}),
    ("Dropout", 1, lambda rng, shape: {"scale": rng.choice((1.0, 0.5))}),
    ("UnaryOp", 1, lambda rng, shape: {"op_type": rng.choice((0, 1, 4, 9, 10, 16))}),
    ("BinaryOp", 5, _scalar),
    ("Softmax", 1, lambda rng, shape: {"axis": _axis(rng, shape), "fixbug0": 1}),
    ("BatchNorm", 4, lambda rng, shape: {"channels": shape[0], "eps": 1e-3}),
    ("Scale", 3, lambda rng, shape: {"scale_data_size": shape[0], "bias_term": rng.randint(0, 1)}),
    ("Bias", 1, lambda rng, shape: {"bias_data_size": shape[0]}),
    ("PReLU", 1, lambda rng, shape: {"num_slope": rng.choice((1, shape[0]))}),
    ("LayerNorm RMSNorm", 1, _norm),
    ("GroupNorm", 1, _group_norm),
    ("InstanceNorm", 1, _instance_norm),
    ("Convolution", 5, _conv(2)),
    ("ConvolutionDepthWise", 3, _conv(2, depthwise=True)),
    ("Deconvolution", 1, _conv(2)),
    ("DeconvolutionDepthWise", 1, _conv(2, depthwise=True)),
    ("Convolution1D", 3, _conv(1)),
    ("ConvolutionDepthWise1D", 1, _conv(1, depthwise=True)),
    ("Deconvolution1D", 1, _conv(1)),
    ("Convolution3D", 2, _conv(3)),
    ("ConvolutionDepthWise3D", 1, _conv(3, depthwise=True)),
    ("InnerProduct", 4, _inner_product),
    ("Gemm", 3, _gemm),
    ("Pooling", 2, _pooling(2)),
    ("Pooling1D", 1, _pooling(1)),
    ("Pooling3D", 1, _pooling(3)),
    ("Reshape", 5, _reshape),
    ("Permute", 5, lambda rng, shape: {"order_type": rng.randrange({1: 1, 2: 2, 3: 6, 4: 24}[len(shape)])}),
    ("Squeeze", 1, lambda rng, shape: {"axes": (_axis(rng, shape),)}),
    ("ExpandDims", 1, lambda rng, shape: {"axes": (rng.randrange(-len(shape) - 1, len(shape) + 1),)}),
    ("Crop", 1, _crop),
    ("Padding", 1, _padding),
    ("Interp", 1, _interp),
    ("Reduction", 1, _reduction),
    ("PixelShuffle", 1, lambda rng, shape: {"upscale_factor": rng.choice((1, 2)), "mode": rng.randint(0, 1)}),
    ("ShuffleChannel", 1, lambda rng, shape: {"group": 2, "reverse": rng.randint(0, 1)}),
    ("Reorg", 1, lambda rng, shape: {"stride": 2, "mode": rng.randint(0, 1)}),
    ("Tile", 1, lambda rng, shape: {"axis": rng.randrange(len(shape)), "tiles": rng.choice((1, 2))}),
    ("CumulativeSum", 1, lambda rng, shape: {"axis": _axis(rng, shape)}),
    ("Flip", 1, lambda rng, shape: {"axes": (rng.randrange(len(shape)),)}),
)
ONE = tuple((type, draw) for types, times, draw in _ONE for type in types.split() for _ in range(times))
# What a convolutional network is made of; passes know these layers best.
CNN = (
    *("Convolution", "ConvolutionDepthWise", "Deconvolution", "DeconvolutionDepthWise", "InnerProduct", "BatchNorm"),
    *("Scale", "BinaryOp", "ReLU", "Clip", "Sigmoid", "Mish", "HardSwish", "PReLU", "Dropout", "Noop", "Pooling"),
    *("Flatten", "Reshape"),
)

# What is written out, of a blob x, and perhaps another one of its shape.
WRITTEN_OUT = (
    "x * (TanH(x * 0.5) + 1.0) * 0.5",
    "Eltwise(Erf(x / 1.41421) * x, x, op_type=1, coeffs=(0.5, 0.5))",
    "x * Clip((x + 3.0) / 6.0, min=0.0, max=1.0)",
    "x * Clip(x + 3.0, min=0.0, max=6.0) / 6.0",
    "HardSigmoid(x, alpha=0.16666667) * x",
    "Sigmoid(x) * 2.0 - 1.0",
    "Eltwise(AbsVal(x), x, op_type=1, coeffs=(0.5, 0.5))",
    "(AbsVal(x) + x) * 0.75",
    "x / Clip(RowNorm(x), min=1e-12, max=3.4e38)",
    "Softmax(x - RowMax(x), axis=-1, fixbug0=1)",
    "x * 0.5 + other",
    "x + other * -0.75",
    "x * 0.5 + other * -0.75",
)
# Functions that are not finite everywhere, guarded as nets without a select do it.
GUARDS = (
    "x / MAX(AbsVal(x), 0.1)",
    "x / (x * x + 0.01)",
    "x * SQRT(MAX(x, 0.0) + 0.01)",
    "x * RSQRT(AbsVal(x) + 0.01)",
    "RECIPROCAL(MAX(AbsVal(x), 0.25))",
    "(ReLU(x) + 0.1) ** 0.3",
    "LOG(MAX(x, 0.01))",
    # log(x) where x is above 0, as the logarithm of 1 elsewhere
    "above = Threshold(x, threshold=0.0); LOG(x * above + (1.0 - above))",
    # smooth L1, and the focal loss
    "size = AbsVal(x); low = MIN(size, 1.0); low * (size - low * 0.5)",
    "p = Clip(Sigmoid(x), min=0.001, max=0.999); q = 1.0 - p; q * q * LOG(p) * -1.0",
)
# And not guarded. What layers make of NaN depends on the machine, so none reads these.
NOT_FINITE = ("x / x", "SQRT(x)", "x * Log(AbsVal(x))")

# Methods of RandomNet, and how often each is called.
CNN_STEPS = {"layer": 65, "combine": 15, "write_out": 10, "end": 5, "pass_on": 5}
STEPS = CNN_STEPS | {"combine": 20, "cut": 6, "multiply": 4, "pad": 4, "write_out": 4, "guard": 4, "spoil": 1, "end": 2}


class RandomNet:
    """A graph, grown layer by layer; the seed is all it depends on. One of the kind `cnn` takes a blob of IMAGE."""

    def __init__(self, seed: int, *, cnn: bool = False) -> None:
        self.rng, self.bits = Random(seed), np.random.default_rng(seed)
        self.graph, self.blobs, self.ends = Graph(), list[Blob](), list[Blob]()
        self.draws = [(type, draw) for type, draw in ONE if not cnn or type in CNN]
        self.left_out = {"dilation_w"} if cnn else set()  # ncnn crashes on some dilated convolutions
        for _ in range(1 if cnn else self.rng.choice((1, 1, 2))):
            shape = IMAGE if cnn else self.rng.choice(INPUTS)
            if not cnn and self.rng.random() < 0.4:
                shape = (*shape[:-1], self.rng.choice(LENGTHS))
            self.add("Input", [], _sizes(shape))
        size, steps = (self.rng.randint(1, 24), CNN_STEPS) if cnn else (self.rng.randint(1, 16), STEPS)
        while len(self.graph) < size + 2:
            (step,) = self.rng.choices([*steps], [*steps.values()])
            getattr(self, step)(self.pick())
        free = [blob for blob in self.blobs if not blob.uses and not blob.is_input]
        inner = [blob for blob in self.blobs if not blob.is_input and self.rng.random() < 0.06]
        self.graph.outputs = [*free, *inner, *self.ends]

    def combine(self, x: Blob) -> None:
        """Add a function of the blob and another one, or of the blob and a constant."""
        rng, kind = self.rng, self.rng.random()
        if kind < 0.5:
            self.add("BinaryOp", self.operands(x), {"op_type": rng.choice((0, 1, 2, 2, 4, 5, 7))})
        elif kind < 0.7:
            self.add("Eltwise", [x, self.like(x)], {"op_type": 1, "coeffs": rng.choice(((), (0.5, -1.5)))})
        elif kind < 0.85:
            gate = self.add(rng.choice(("Sigmoid", "HardSigmoid")), [x], {})
            self.add("BinaryOp", rng.sample([x, gate], 2) if gate else [x, x], {"op_type": 2})
        else:
            self.add("Concat", [x, self.like(x)], {"axis": rng.randrange(len(x.shape or ()))})

    def cut(self, x: Blob) -> None:
        self.add("Slice", [x], {"slices": (-233, -233), "axis": self.rng.randrange(len(x.shape or ()))}, tops=2)

    def multiply(self, x: Blob) -> None:
        matrices = [blob for blob in self.blobs if len(blob.shape or ()) == 2]
        if x in matrices:
            self.add("MatMul", [x, self.rng.choice(matrices)], {"transB": self.rng.randint(0, 1)})

    def pass_on(self, x: Blob) -> None:
        self.add("Noop", [x, self.pick()], {}, tops=2)

    def guard(self, x: Blob) -> None:
        self.write_out(x, GUARDS)

    def spoil(self, x: Blob) -> None:
        before = len(self.blobs)
        self.write_out(x, NOT_FINITE)
        self.ends += [blob for blob in self.blobs[before:] if not blob.uses]
        del self.blobs[before:]

    def write_out(self, x: Blob, formulas: Sequence[str] = WRITTEN_OUT) -> None:
        """Add the layers of a formula; one that does not fit is left out."""

        def make(operator: str, *operands: Any, **params: Any) -> Blob:
            type, inputs, params = layer_of(operator, *operands, **params)
            return self.add(type, inputs, params) or inputs[0]

        evaluate(self.rng.choice(formulas), {"x": x, "other": self.like(x)}, float, make)

    def end(self, x: Blob) -> None:
        """Add a classifier's last layers to an image."""
        pooled = self.add("Pooling", [x], {"pooling_type": 1, "global_pooling": 1})
        flat = pooled and self.add(*self.rng.choice((("Flatten", [pooled], {}), ("Reshape", [pooled], {"w": -1}))))
        dense = flat and self.add("InnerProduct", [flat], _inner_product(self.rng, known(flat.shape or ())) or {})
        if dense and self.rng.random() < 0.5:
            self.add("Dropout", [dense], {"scale": 0.5})

    def pad(self, x: Blob | None) -> None:
        """Add a Padding, mostly without negative values, and a layer that may make it needless."""
        rng = self.rng
        draws = {"Padding": _padding, "Crop": _crop, "Pooling": _pooling(2), "Pooling1D": _pooling(1)}
        for type in ("ReLU", "Padding", rng.choice(("Pooling", "Pooling1D", "Padding", "Crop"))):
            if x is None or (type == "ReLU" and rng.random() < 0.3):
                continue
            params = draws[type](rng, known(x.shape or ())) if type in draws else {}
            x = self.add(type, [x], params) if params is not None else x

    def layer(self, x: Blob) -> None:
        type, draw = self.rng.choice(self.draws)
        params = draw(self.rng, known(x.shape or ()))
        if params is not None:
            self.add(type, [x], {name: value for name, value in params.items() if name not in self.left_out})

    def pick(self) -> Blob:
        """Return a blob, mostly a recent one."""
        return self.blobs[-1 - min(int(self.rng.expovariate(0.7)), len(self.blobs) - 1)]

    def like(self, x: Blob) -> Blob:
        """Return a blob of the same shape, perhaps the same one."""
        return self.rng.choice([blob for blob in self.blobs if blob.shape == x.shape])

    def operands(self, x: Blob) -> list[Blob]:
        """Return, in any order, the blob and another or a constant: a scalar, a vector for one axis, or its shape."""
        rng = self.rng
        if rng.random() < 0.4:
            return rng.sample([x, self.like(x)], 2)
        shape = known(x.shape or ())
        kept = rng.choice([(), (0,), (len(shape) - 1,), tuple(range(len(shape)))])
        sizes = [size if axis in kept else 1 for axis, size in enumerate(shape)]
        constant = self.add("MemoryData", [], _sizes([shape[0]] if rng.random() < 0.3 else sizes))
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
