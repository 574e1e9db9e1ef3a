"""Short declarations of layer types that ncnn lacks: the sizes of their weights."""

import re

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.spec import CUSTOM, SHAPE_HINTS_ID, LayerSpec, parse_params, parse_weights

_DECLARATION = r"([^\s:]+):([^\s:]*)"
_WEIGHT = r"((?:p?[0-9]{1,9})(?:\*p?[0-9]{1,9})*)(@tagged)?"


def custom_layer(text: str) -> LayerSpec:
    """Return the type that ``TYPE:COUNT[@tagged],...`` declares.

    There is one COUNT for each weight, in the order of the .bin: its number of elements, as a product of numbers and
    integer parameters (``p0*9``). ``@tagged`` marks a weight that the layer loads with ``mb.load(n, 0)``: it has a tag
    before it in the file. ``mb.load(n, 1)`` reads bare float32. Raises UsageError for other text.
    """
    match = re.fullmatch(_DECLARATION, text)
    weights = [re.fullmatch(_WEIGHT, part) for part in match[2].split(",")] if match and match[2] else []
    if not match or None in weights:
        raise UsageError(f"'{text}' does not declare a custom layer; an example is MyLayer:p6@tagged,p0")
    ids = sorted({int(id) for weight in weights if weight for id in re.findall(r"p([0-9]+)", weight[1])})
    if ids and ids[-1] >= SHAPE_HINTS_ID:
        raise UsageError(f"'{text}': there is no p{ids[-1]}: a layer's own parameters are p0 to p{SHAPE_HINTS_ID - 1}")
    return LayerSpec(
        match[1],
        CUSTOM,
        params=parse_params(", ".join(f"{id} p{id}" for id in ids)),
        weights=parse_weights(
            ", ".join(f"weight_{i}{'*' if weight[2] else ''}={weight[1]}" for i, weight in enumerate(weights) if weight)
        ),
        inputs=(0, None),
        outputs=(0, None),
        one_blob_only=False,
    )
