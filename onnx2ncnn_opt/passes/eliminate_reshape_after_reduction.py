from onnx2ncnn_opt.ir.dim import Shape
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.view import Regroup
from onnx2ncnn_opt.passes._views import VIEWS, step_of
from onnx2ncnn_opt.rewrite.pattern import Op, op
from onnx2ncnn_opt.rewrite.rule import known_shape, require, rewrite


def _elementwise(capture: str, x: Op) -> Op:
    return op(("BinaryOp", "UnaryOp", "Clip"), capture, lambda layer: len(layer.inputs) == 1)(x)


def _leaves_inner_axes(reduction: Layer) -> bool:
    """Return True if inner axes remain behind a reduced one: without them, ncnn broadcasts the result correctly."""
    rank = len(reduction.input.shape or ())
    return rank > 0 and max(-axis if axis < 0 else rank - axis for axis in reduction["axes"]) > len(reduction["axes"])


def kept_shape(reduction: Layer, shape: Shape) -> Shape:
    """Return the shape of a Reduction's result with keepdims."""
    axes = {axis % len(shape) for axis in reduction["axes"]}
    return tuple(1 if axis in axes else size for axis, size in enumerate(shape))


# A Reduction before a Reshape that keepdims makes unnecessary.
SHORT = op("Reduction", "reduction", _leaves_inner_axes, reduce_all=0, keepdims=0)
_REDUCTION = SHORT("x")
_ONE = _elementwise("first", _REDUCTION)
_TWO = _elementwise("second", _ONE)
_THREE = _elementwise("third", _TWO)


@rewrite(
    *(op(VIEWS, "view")(inner) for inner in (_REDUCTION, _ONE, _TWO, _THREE)),
    exact=False,  # rows have other ends, where ncnn computes functions in another way
    purpose="means and maxima over the channels, as torch.export writes them",
)
def eliminate_reshape_after_reduction(
    x: Blob,
    reduction: Layer,
    view: Layer,
    first: Layer | None = None,
    second: Layer | None = None,
    third: Layer | None = None,
) -> list[Layer]:
    """x ── Reduction ── elementwise ── Reshape ──   ⇒   x ── Reduction (keepdims) ── elementwise ──

    The Reshape must restore the axes that the Reduction removed; up to three elementwise layers may be between them.
    Not for innermost axes, along which the result broadcasts anyway.
    """
    kept = kept_shape(reduction, known_shape(x))
    same = isinstance(step_of(view), Regroup) and view.output.shape == kept
    require(same, f"{view.type} '{view.name}' does more than restore the reduced axes")
    layers = [reduction.having(keepdims=1)]
    for layer in (first, second, third):
        if layer is not None:
            layers[-1].outputs = (Blob(layer.input.name, kept, x.batch),)
            layers.append(layer.having(inputs=layers[-1].outputs))
    return layers
