from onnx2ncnn_opt.ir.dim import known
from onnx2ncnn_opt.ir.graph import Layer
from onnx2ncnn_opt.ir.weight import Encoding
from onnx2ncnn_opt.passes._constants import with_data
from onnx2ncnn_opt.passes._views import VIEWS, in_layout, steps_of
from onnx2ncnn_opt.rewrite.pattern import const, op
from onnx2ncnn_opt.rewrite.rule import require, rewrite


@rewrite(op(VIEWS, "view")(const("constant")), exact=True, purpose="masks and position embeddings")
def fuse_memorydata_view(constant: Layer, view: Layer) -> Layer:
    """MemoryData ── Reshape (Permute, Squeeze, ExpandDims, Flatten) ──   ⇒   MemoryData"""
    steps = steps_of([view])
    require(steps, f"{view.type} '{view.name}' is more than a view")
    require(constant.output.uses == 1, f"'{constant.output.name}' has other consumers")
    block = constant.weights.stored("data")
    require(block.encoding is Encoding.FP32, f"'{constant.name}' is stored in another encoding")
    return with_data(constant, in_layout(block.data.reshape(known(constant.output.known_shape)), steps))
