"""Nets that take pixels of 0..255: an app's arithmetic on an image becomes a part of the net.

The passes run after this, and fold the added layers into the first convolution if that is exact.
"""

from collections.abc import Mapping

import numpy as np

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.ir.shapes import assign_shapes
from onnx2ncnn_opt.manifest import Image
from onnx2ncnn_opt.onnx.importer import Imported
from onnx2ncnn_opt.onnx.walk import Port
from onnx2ncnn_opt.rewrite.edit import Names

_FORM = (
    "mean=123.7,116.3,103.5:std=58.4,57.1,57.4, with ':bgr' for pixels in that order and ':letterbox=114' for pictures "
    "that keep their aspect"
)


def parse_image(name: str, image: Image | str) -> Image:
    """Parse an option such as "mean=127.5:std=58:bgr" for an input; raises UsageError for text in another form."""
    if isinstance(image, Image):
        return image
    if not isinstance(image, str):
        raise UsageError(f"images['{name}'] has to be an Image or text like {_FORM}, not {image!r:.80}")
    numbers: dict[str, tuple[float, ...]] = {}
    bgr = False
    for part in filter(None, image.split(":")):
        key, _, values = part.partition("=")
        if part == "bgr" and not bgr:
            bgr = True
        elif key in ("mean", "std", "letterbox") and key not in numbers:
            try:
                numbers[key] = tuple(map(float, ("114" if part == "letterbox" else values).split(",")))  # YOLO's grey
            except ValueError as error:
                raise UsageError(f"the image '{name}': '{part}' is not {key}=NUMBER,...") from error
        else:
            raise UsageError(f"the image '{name}' takes {_FORM}, not '{part}'")
    try:
        letterbox, *others = numbers.get("letterbox", (None,))
        if others:
            raise ValueError("letterbox is one number")
        return Image(numbers.get("mean", (0.0,)), numbers.get("std", (1.0,)), bgr, letterbox)
    except ValueError as error:
        raise UsageError(f"the image '{name}': {error}") from error


def take_pixels(net: Imported, images: Mapping[str, Image]) -> None:
    """Let inputs of a net take pixels; UsageError if one is not an image, or has another number of channels."""
    ports = {port.name: port for port in net.inputs}
    for name, image in images.items():
        if name not in ports:
            raise UsageError(f"the image '{name}': the net's inputs are {', '.join(ports) or 'none'}")
        channels = _channels(ports[name])
        for what, numbers in (("mean", image.mean), ("std", image.std)):
            if len(numbers) not in (1, channels):
                text = f"{what} has {len(numbers)} numbers, but the input has {channels} channels"
                raise UsageError(f"the image '{name}': {text}")
        if image.letterbox is not None and channels not in (1, 3):
            raise UsageError(f"the image '{name}': letterbox is for 1 or 3 channels, not {channels}")
        _prepend(net.graph, ports[name].blob, image, channels)


def _channels(port: Port) -> int:
    """Return the number of channels of an image, the outermost dim of its Mat; UsageError for another layout."""
    axis = 1 if port.batch_axis == 0 else 0
    rank = len(port.shape) - (port.batch_axis is not None)
    shape = f"{port.dtype.name}[{', '.join(map(str, port.shape))}]"
    if port.dtype.kind in "iub":
        raise UsageError(f"the image '{port.name}' is {shape}: it takes integers already")
    if rank != 3 or port.batch_axis not in (None, 0):
        raise UsageError(
            f"the image '{port.name}' is {shape}, which goes in with batch axis {port.batch_axis}; images are "
            f"[N, C, H, W] with batch axis 0 (see --batch-axis), or [C, H, W]"
        )
    channels = port.shape[axis]
    if not isinstance(channels, int):
        raise UsageError(f"the image '{port.name}' is {shape}: its channels have to be fixed, see --shape")
    return channels


def _prepend(graph: Graph, blob: Blob, image: Image, channels: int) -> None:
    """Insert the layers between an input and its consumers."""
    std = np.broadcast_to(np.asarray(image.std, np.float64), channels)
    mean = np.broadcast_to(np.asarray(image.mean, np.float64), channels)
    scale, shift = 1 / std, -mean / std
    if image.bgr:
        scale, shift = scale[::-1], shift[::-1]
    added: list[Layer] = []
    if (scale != 1).any() or shift.any():
        weights = {"scale_data": scale.astype(np.float32)}
        if shift.any():
            weights["bias_data"] = shift.astype(np.float32)
        params = {"scale_data_size": channels, "bias_term": int(shift.any())}
        added.append(Layer("Scale", f"{blob.name}_normalize", params=params, weights=weights))
    if image.bgr and channels > 1 and not _flip_channels(blob, channels):
        weight = np.eye(channels, dtype=np.float32)[::-1].reshape(-1)
        params = {"num_output": channels, "kernel_w": 1, "weight_data_size": channels * channels}
        added.append(Layer("Convolution", f"{blob.name}_rgb", params=params, weights={"weight_data": weight}))
    names, end = Names(graph), blob
    first = next((layer for layer in graph if blob in layer.inputs), None)
    for layer in added:
        layer.inputs, layer.outputs = (end,), (Blob(layer.name, blob.shape, blob.batch),)
        end = layer.output
    graph.redirect(blob, end)
    graph.outputs = [end if output is blob else output for output in graph.outputs]
    for layer in added:
        names.give(layer, ())
        graph.add(layer, before=first)
        assign_shapes(layer)


def _flip_channels(blob: Blob, channels: int) -> bool:
    """Reverse the input channels of all consumers and return True, if these are convolutions over all channels."""
    consumers = blob.users
    if blob.is_output or not all(
        layer.type == "Convolution" and len(layer.inputs) == 1 and layer.weights.stored("weight_data").is_float
        for layer in consumers
    ):
        return False
    for layer in consumers:
        weight = layer.weights["weight_data"].reshape(layer["num_output"], channels, -1)
        layer.weights["weight_data"] = np.ascontiguousarray(weight[:, ::-1]).reshape(-1)
    return bool(consumers)
