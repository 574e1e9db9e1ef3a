"""The nodes, inputs and outputs that an import refused, and advice on converting the rest of the model."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import onnx_ir

from onnx2ncnn_opt.errors import Unsupported
from onnx2ncnn_opt.onnx.read.structure import names_of, read_values
from onnx2ncnn_opt.onnx.value import Item, Tensor


@dataclass
class Refusals:
    """The refusals of an import."""

    unsupported: list[Unsupported] = field(default_factory=list)
    nodes: set[onnx_ir.Node] = field(default_factory=set)  # those of the model's graph
    lost: set[str] = field(default_factory=set)  # inputs and outputs that no Mat can hold
    tainted: set[str] = field(default_factory=set)  # values that depend on refused nodes and lost inputs

    def is_tainted(self, values: Iterable[onnx_ir.Value | None]) -> bool:
        """Return True if one of the values is tainted."""
        return not self.tainted.isdisjoint(names_of(values))

    def cut_advice(
        self,
        graph: onnx_ir.Graph,
        outputs: Collection[str],
        values: Mapping[str, Item | None],
        fits: Callable[[Tensor], bool],
    ) -> tuple[str, list[str]]:
        """Return advice on converting the nodes before the refused ones, and where to cut; empty if each has a hint.

        `fits` returns True for a tensor that can be an output of a net.
        """
        sound = [node for node in graph if not self.is_tainted(node.outputs)]
        needed = {*outputs, *names_of(value for node in set(graph).difference(sound) for value in read_values(node))}
        made = [name for node in sound for name in names_of(node.outputs) if name and name in needed]
        cut = {name: x for name in made if isinstance(x := values[name], Tensor)}
        if not cut or all(node.hint for node in self.unsupported) or not all(map(fits, cut.values())):
            return "", []
        has_nms = any(node.operator == "NonMaxSuppression" for node in self.unsupported)
        export = "export the model without NMS, or " if has_nms else ""
        part = f"convert the {len(sound)} of {len(graph)} nodes before them with --outputs {','.join(cut)}"
        return f"{export}{part} and do the rest outside ncnn", list(cut)
