"""The edits that a rewrite may ask for, with the checks that hold for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer
from onnx2ncnn_opt.rewrite.pattern import Match
from onnx2ncnn_opt.rewrite.rule import require


def require_private(match: Match) -> None:
    """Refuse a match whose inner blobs are needed elsewhere, or that has parameters nobody knows the meaning of."""
    inside = set(match.layers)
    for layer in match.layers[1:]:
        for blob in layer.outputs:
            require(not blob.is_output, f"'{blob.name}' is an output of the net")
            for user in blob.users:
                require(user in inside, f"'{blob.name}' is also used by {user.type} '{user.name}'")
    inner = {blob for layer in match.layers[1:] for blob in layer.outputs}
    for captured in match.captures.values():
        # One and the same blob as an inner blob and as an operand: the result would need what is removed.
        require(captured not in inner, f"'{captured.name}' is needed for itself, too")
    for layer in match.layers:
        for name in layer.params:
            require(isinstance(name, str), f"parameter {name} of {layer.type} '{layer.name}' is unknown")


def substitute(graph: Graph, match: Match, layers: Sequence[Layer]) -> None:
    """Put new layers in the place of a match; the last takes over the root's outputs.

    They unite the origins and feature masks of what they replace: an opt-out of fp16 must survive a fusion.
    """
    root = match.root
    origin = dict.fromkeys(name for layer in (*match.layers[::-1], *match.kept) for name in layer.origin)
    mask = 0
    for layer in match.layers:
        mask |= layer["featmask"]
    for new in layers:
        new.origin = tuple(origin)
        new.params.pop("shape_hints", None)
        if mask:
            new.params["featmask"] = mask
    if root["shape_hints"]:
        layers[-1].params["shape_hints"] = root["shape_hints"]
    for new in layers[:-1]:
        graph.add(new, before=root)
    graph.replace(root, layers[-1])
    remove_all(graph, match.layers[1:])


def eliminate(graph: Graph, match: Match, blobs: Sequence[Blob]) -> tuple[Layer, ...]:
    """Use blobs instead of the root's outputs, and remove the match; returns the layers that read something else now.
    A name that the net's caller knows survives: where the root's output is an output of the net, the blob takes over
    its name. Refused where the blob has such a name itself.
    """
    pairs = list(zip(match.root.outputs, blobs, strict=True))
    renamed: dict[Blob, Blob] = {}
    for old, new in pairs:
        if old.is_output:
            require(not new.is_input, f"both '{new.name}' and '{old.name}' are public names: an input and an output")
            require(not new.is_output, f"both '{new.name}' and '{old.name}' are outputs of the net")
            require(new not in renamed.values(), f"'{old.name}' is one of several outputs with the same value")
            renamed[old] = new
    moved = tuple(dict.fromkeys(user for old, _ in pairs for user in old.users))
    for old, new in pairs:
        graph.redirect(old, new)
        new.shape = old.shape if new.shape is None else new.shape
    if renamed:
        graph.outputs = [renamed.get(blob, blob) for blob in graph.outputs]
    remove_all(graph, match.layers)
    for old, new in renamed.items():
        new.name = old.name
    return moved


def remove_all(graph: Graph, layers: Iterable[Layer]) -> None:
    """Remove layers that only need each other, whatever their order; GraphError where somebody else needs one."""
    left = list(layers)
    while left:
        free = [layer for layer in left if not any(blob.uses for blob in layer.outputs)]
        for layer in free or left[:1]:
            graph.remove(layer)
        left = [layer for layer in left if layer.graph is graph]
