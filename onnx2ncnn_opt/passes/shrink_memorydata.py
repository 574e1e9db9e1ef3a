from collections.abc import Sequence

from onnx2ncnn_opt.ir.attention import mask_slot
from onnx2ncnn_opt.ir.dim import known
from onnx2ncnn_opt.ir.graph import Blob, Layer
from onnx2ncnn_opt.ir.weight import one_of_equal_slices
from onnx2ncnn_opt.passes._constants import with_data
from onnx2ncnn_opt.rewrite.pattern import op
from onnx2ncnn_opt.rewrite.rule import Replacement, layer_pass, require

_PACK = 4  # ncnn packs 4 slices of the outermost axis, if their number is a multiple of 4
_SHORT = 32  # with rows of this size or more, a broadcasting BinaryOp is as fast as a plain one


@layer_pass(op("MemoryData"), exact=False, purpose="slopes and masks that exporters store in full size")
def shrink_memorydata(constant: Layer) -> Replacement | None:
    """x, MemoryData (equal slices) ── BinaryOp (MatMul, SDPA) ──   ⇒   x, MemoryData (one slice) ── BinaryOp ──

    The layer has to broadcast the slice to the same shape. Short rows stay: broadcasting them is slower.
    """
    blob = constant.output
    if not blob.users or blob.is_output:
        return None
    axes = set.intersection(*(_broadcast_axes(user, blob) for user in blob.users))
    if not axes:
        return None
    data = constant.weights.stored("data").data.reshape(known(blob.known_shape))
    small = one_of_equal_slices(data, axes)
    if small.shape == data.shape:
        return None
    # Vulkan broadcasts sizes of 1 only between Mats of equal rank.
    ranks = {len(other.shape or ()) for user in blob.users if user.type == "BinaryOp" for other in user.inputs}
    if max(ranks, default=0) > small.ndim:
        require(len(ranks - {small.ndim}) == 1, f"'{blob.name}' is used with Mats of different ranks")
        small = small.reshape(small.shape + (1,) * (max(ranks) - small.ndim))
    for user in blob.users:
        if user.type == "BinaryOp":
            require(_is_fast(user, small.shape), f"rows of '{blob.name}' are short: they are faster in the full size")
    if all(user.type == "SDPA" for user in blob.users):
        small = small[0]  # ncnn's Vulkan code reads beyond a 3-D mask of one head
    new = with_data(constant, small).having(outputs=[Blob(blob.name, small.shape)])
    return Replacement((constant,), added=[(new, constant)], reads={blob: new.output})


def _broadcast_axes(user: Layer, blob: Blob) -> set[int]:
    """Return the axes of a constant along which `user` can broadcast one slice, because the other operand is full."""
    shape = known(blob.shape or ())
    if user.type == "SDPA":
        is_mask = user.inputs.index(blob) == mask_slot(user) and user.inputs.count(blob) == 1
        return {0} if is_mask and len(shape) == 3 and shape[0] > 1 else set()
    others = [other for other in user.inputs if other is not blob]
    if user.type not in ("BinaryOp", "MatMul") or len(user.inputs) != 2 or len(others) != 1:
        return set()
    other = others[0].shape
    if other is None or len(shape) < 2 or len(other) < len(shape):
        return set()
    axes = {axis for axis, size in enumerate(shape) if size > 1 and other[axis] == size}
    if user.type == "MatMul":
        return {axis for axis in axes if axis < len(shape) - 2} if len(other) == len(shape) else set()
    return axes


def _is_fast(user: Layer, small: Sequence[int]) -> bool:
    """Return True if the BinaryOp works on rows that are long enough, or on whole channels."""
    shape = user.output.shape
    if shape is None or not isinstance(shape[-1], int):
        return False
    packed = _PACK if isinstance(shape[0], int) and shape[0] % _PACK == 0 else 1
    return all(size == 1 for size in small[1:]) or shape[-1] * packed >= _SHORT
