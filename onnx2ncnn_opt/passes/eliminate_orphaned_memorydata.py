from collections.abc import Iterator

from onnx2ncnn_opt.ir.graph import Graph
from onnx2ncnn_opt.rewrite.rule import Replacement, graph_pass


@graph_pass(exact=True)
def eliminate_orphaned_memorydata(graph: Graph) -> Iterator[Replacement]:
    """MemoryData, or any other layer, that no output of the net needs   ⇒   nothing

    Input layers stay, because callers feed them. So do layers with at least one used output.
    """
    for layer in reversed(graph):
        if layer.type != "Input" and not layer.is_used:
            yield Replacement((layer,))
