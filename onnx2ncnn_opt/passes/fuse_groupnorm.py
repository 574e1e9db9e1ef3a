import numpy as np

from onnx2ncnn_opt.ir.dim import by_axis, exact_div
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.view import Regroup
from onnx2ncnn_opt.passes._views import VIEWS, step_of
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import fixed_shape, fixed_size, known_shape, require, rewrite

# The layers that normalise each group separately.
_INSTANCES = op("InstanceNorm", "norm")
_ROWS = op("LayerNorm", "norm", lambda norm: len(norm.input.shape or ()) == 2, affine=0)


@rewrite(
    *(op(VIEWS, "back")(norm(op(VIEWS, "groups")("x"))) for norm in (_INSTANCES, _ROWS)),
    exact=False,
    purpose="exports of GroupNorm before opset 18",
)
def fuse_groupnorm(x: Blob, groups: Layer, norm: Layer, back: Layer) -> Layer | list[Layer]:
    """x ── Reshape (channels to groups) ── InstanceNorm ── Reshape (back) ──   ⇒   x ── GroupNorm ──

    Also for a LayerNorm with one row for each group, and if a consumer reads the groups in another shape.
    """
    for view in (groups, back):
        require(isinstance(step_of(view), Regroup), f"{view.type} '{view.name}' is not a mere reshape")
    rows, channels = known_shape(norm.input), fixed_size(x, 0)
    require(norm.type == "InstanceNorm" or norm["affine_size"] == rows[-1], "the rows are not whole groups")
    size = exact_div(channels, rows[0])
    require(size is not None, f"{channels} channels do not make {rows[0]} groups")
    assert isinstance(size, int)
    params = {"group": rows[0], "channels": channels, "eps": norm["eps"]}
    weights = {}
    if norm.type == "LayerNorm" or not norm["affine"]:
        params["affine"] = 0
    else:
        weights = {name: np.repeat(norm.weights[name], size) for name in ("gamma_data", "beta_data")}
    new = Layer("GroupNorm", norm.name, [x], (), params, weights)
    if back.output.shape == x.shape:
        return new
    shape = fixed_shape(back.output)
    new.outputs = (Blob(norm.output.name, x.shape, x.batch),)
    return [new, Layer("Reshape", back.name, [new.output], (), by_axis(shape))]
