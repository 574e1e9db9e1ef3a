"""A minimum cut: the cheapest edges to remove so that no path leads from the source to the sink."""

from collections import deque
from collections.abc import Hashable

from onnx2ncnn_opt.ir.reached import reached


class Network(dict[Hashable, dict[Hashable, float]]):
    """Directed edges with capacities; ``network[a][b]`` is the residual capacity from a to b."""

    def connect(self, start: Hashable, end: Hashable, capacity: float) -> None:
        """Add an edge."""
        edges = self.setdefault(start, {})
        edges[end] = edges.get(end, 0.0) + capacity
        self.setdefault(end, {}).setdefault(start, 0.0)

    def sink_side(self, source: Hashable, sink: Hashable) -> set[Hashable] | None:
        """Return the smallest sink side of a minimum cut, or None if every cut has infinite cost.

        The algorithm is Edmonds-Karp: it augments the shortest paths.
        """
        while path := self._path(source, sink):
            amount = min(self[a][b] for a, b in path)
            if amount == float("inf"):
                return None
            for a, b in path:
                self[a][b] -= amount
                self[b][a] += amount
        predecessors: dict[Hashable, list[Hashable]] = {}
        for start, edges in self.items():
            for end, residual in edges.items():
                if residual > 0:
                    predecessors.setdefault(end, []).append(start)
        return set(reached([sink], lambda node: predecessors.get(node, ())))

    def _path(self, source: Hashable, sink: Hashable) -> list[tuple[Hashable, Hashable]]:
        previous: dict[Hashable, Hashable] = {source: source}
        pending = deque([source])
        while pending and sink not in previous:
            start = pending.popleft()
            for end, residual in self.get(start, {}).items():
                if residual > 0 and end not in previous:
                    previous[end] = start
                    pending.append(end)
        path: list[tuple[Hashable, Hashable]] = []
        end = sink
        while end in previous and end != source:
            path.append((previous[end], end))
            end = previous[end]
        return path
