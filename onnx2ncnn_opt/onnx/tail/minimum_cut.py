"""A minimum cut: the cheapest edges to remove so that no path leads from the source to the sink."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable


class Network(dict[Hashable, dict[Hashable, float]]):
    """Directed edges with capacities; ``network[a][b]`` is what still flows from a to b."""

    def connect(self, start: Hashable, end: Hashable, capacity: float) -> None:
        """Add an edge."""
        edges = self.setdefault(start, {})
        edges[end] = edges.get(end, 0.0) + capacity
        self.setdefault(end, {}).setdefault(start, 0.0)

    def sink_side(self, source: Hashable, sink: Hashable) -> set[Hashable] | None:
        """Return the fewest vertices, the sink among them, that a minimum cut parts from the source.

        None if every cut costs infinitely much. Paths are the shortest ones (Edmonds and Karp).
        """
        while path := self._path(source, sink):
            amount = min(self[a][b] for a, b in path)
            if amount == float("inf"):
                return None
            for a, b in path:
                self[a][b] -= amount
                self[b][a] += amount
        into: dict[Hashable, list[Hashable]] = {}
        for start, edges in self.items():
            for end, left in edges.items():
                if left > 0:
                    into.setdefault(end, []).append(start)
        found, pending = {sink}, [sink]
        while pending:
            new = [start for start in into.get(pending.pop(), ()) if start not in found]
            found.update(new)
            pending += new
        return found

    def _path(self, source: Hashable, sink: Hashable) -> list[tuple[Hashable, Hashable]]:
        before: dict[Hashable, Hashable] = {source: source}
        pending = deque([source])
        while pending and sink not in before:
            start = pending.popleft()
            for end, left in self.get(start, {}).items():
                if left > 0 and end not in before:
                    before[end] = start
                    pending.append(end)
        path: list[tuple[Hashable, Hashable]] = []
        end = sink
        while end in before and end != source:
            path.append((before[end], end))
            end = before[end]
        return path
