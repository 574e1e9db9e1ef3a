"""The engine that runs passes to a fixpoint; its cost grows with the size of the graph and the number of rewrites.

Every rewrite has a queue of layers that may be the root of a match. At first these are all layers whose kind, and the
kinds of the layers before them, fit a pattern. After a rewrite, only the layers near it are queued again. The passes
run in their order, again and again, until all queues are empty. A pass over the whole graph waits until the queues of
the rewrites before it are empty.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from onnx2ncnn_opt.errors import GraphError, PluginError, plugged
from onnx2ncnn_opt.ir.graph import Blob, Graph, Layer, check_layer
from onnx2ncnn_opt.progress import Count, announce
from onnx2ncnn_opt.rewrite.edit import Names, carry_out, require_private
from onnx2ncnn_opt.rewrite.events import Applied, Event, Failed, NearMiss, refs
from onnx2ncnn_opt.rewrite.pattern import Kind, Match, kinds_of
from onnx2ncnn_opt.rewrite.rule import GraphPass, Miss, Pass, Refused, Replacement, Result, Rewrite

# A blob with more uses is not an inner blob of any pattern, so a change above it cannot reach its users' matches.
_MOST_INNER_USES = 8
# Every rewrite makes a net smaller or simpler, so an endless sequence is a bug in a pass.
_MOST_REWRITES_PER_LAYER = 50

Veto: TypeAlias = Callable[[Layer], str | None]


def run(
    graph: Graph, passes: Sequence[Pass], *, limit: int | None = None, check: bool = False, veto: Veto | None = None
) -> list[Event]:
    """Apply passes until none matches; return the rewrites, then the near misses and failed passes.

    `limit` is the largest number of rewrites, to bisect which one breaks a net. `check` verifies the graph after each.
    `veto` gets every layer that a rewrite would add, and returns a reason to refuse it, or None. If a pass fails, the
    other passes start again with the original graph; with `check` the error is raised.
    """
    failed: dict[Pass, Failed] = {}
    undo = graph.checkpoint()
    while True:
        run = _Pipeline(graph, [p for p in passes if p not in failed], limit, check, veto)
        try:
            with np.errstate(all="ignore"):  # overflow and NaN happen as in the net
                return [*run.run(), *failed.values()]
        except PluginError as error:
            if check:
                raise
            failed[run.current] = Failed(run.current.name, str(error))
            undo()


class _Pipeline:
    def __init__(self, graph: Graph, passes: Sequence[Pass], limit: int | None, check: bool, veto: Veto | None) -> None:
        self.graph, self.passes, self.check, self.veto = graph, passes, check, veto or (lambda layer: None)
        self.limit = _MOST_REWRITES_PER_LAYER * (len(graph) + 1) if limit is None else limit
        self.bounded = limit is None
        self.applied: list[Event] = []
        self.near_misses: dict[Pass, dict[Layer, NearMiss]] = {p: {} for p in passes}
        self.names: Names | None = None
        rewrites = [p for p in passes if isinstance(p, Rewrite)]
        # FIFO queues that hold a layer at most once.
        self.queues: dict[Rewrite, OrderedDict[Layer, None]] = {rule: OrderedDict() for rule in rewrites}
        self.by_kinds = _by_kinds(tuple(rewrites))
        self.depth = max((p.depth for p in rewrites), default=0)

    def run(self) -> list[Event]:
        for layer in self.graph:
            for rule in self._rules(layer):
                self.queues[rule].setdefault(layer)
        seen: dict[GraphPass, int] = {}
        before = -1
        while before != len(self.applied):
            before = len(self.applied)
            earlier: list[Rewrite] = []
            for p in self.passes:
                if isinstance(p, Rewrite):
                    self._drain(p)
                    earlier.append(p)
                    continue
                self._settle(earlier)
                announce(f"pass {p.name}")
                if seen.get(p) != len(self.applied):
                    seen[p] = len(self.applied)
                    self._sweep(p)
        if self.bounded and self._is_full:
            with self._guarded(next(p for p in self.passes if p.name == self.applied[-1].pass_name)):
                raise GraphError(f"the passes do not come to an end; the last rewrite was {self.applied[-1]}")
        misses = ((p, *pair) for p, by_layer in self.near_misses.items() for pair in by_layer.items())
        current = ((p, root, miss) for p, root, miss in misses if root.graph is self.graph)
        valid = (miss for p, root, miss in current if isinstance(p, GraphPass) or p in self._rules(root))
        return [*self.applied, *valid]

    def _rules(self, layer: Layer) -> list[Rewrite]:
        """Return the rewrites that may match at a layer, by `kinds_of` it."""
        kinds = kinds_of(layer)
        if kinds not in self.by_kinds:
            self.by_kinds[kinds] = [rule for rule in self.queues if rule.candidates(kinds)]
        return self.by_kinds[kinds]

    @property
    def _is_full(self) -> bool:
        return len(self.applied) >= self.limit

    def _settle(self, rewrites: Sequence[Rewrite]) -> None:
        """Finish the rewrites: a pass over the whole graph must not consume layers that they can still fold."""
        while any(map(self.queues.__getitem__, rewrites)) and not self._is_full:
            for p in rewrites:
                self._drain(p)

    def _drain(self, p: Rewrite) -> None:
        queue = self.queues[p]
        if not queue:  # as for most passes
            return
        announce(f"pass {p.name}")
        count = Count(f"pass {p.name}", "layers", len(queue))
        with self._guarded(p):
            while queue and not self._is_full:
                layer, _ = queue.popitem(last=False)
                count.add()
                if layer.graph is self.graph:
                    self._try(p, layer)

    def _try(self, p: Rewrite, root: Layer) -> None:
        """Apply the first match at a root that is not refused; otherwise keep the first refusal."""
        self.near_misses[p].pop(root, None)
        for match in p.matches(root):
            try:
                require_private(match.layers[::-1], root.outputs, match.blobs, match.kept)
                self._apply(p, replacement(match, p.result(match)))
            except Refused as refusal:
                miss = NearMiss(p.name, refs(match.layers[::-1]), str(refusal))
                self.near_misses[p].setdefault(root, miss)
            else:
                return

    def _guarded(self, p: Pass) -> AbstractContextManager[None]:
        """Turn an exception in a pass into a PluginError; `check` keeps an error of our own passes for tests."""
        self.current = p
        if p.is_foreign:
            return plugged(f"the pass {p.name} of the plug-in {p.function.__module__}", MemoryError)
        return nullcontext() if self.check else plugged(f"the pass {p.name}", MemoryError)

    def _sweep(self, p: GraphPass) -> None:
        if self._is_full:
            return
        misses = self.near_misses[p]
        misses.clear()
        count = Count(f"pass {p.name}", "rewrites")
        with self._guarded(p):
            for edit in p.function(self.graph):
                count.add()
                if isinstance(edit, Miss):
                    misses[edit.layers[-1]] = NearMiss(p.name, refs(edit.layers), edit.reason)
                    continue
                try:
                    self._apply(p, edit)
                except Refused as refusal:
                    misses[edit.layers[-1]] = NearMiss(p.name, refs(edit.layers), str(refusal))
                if self._is_full:
                    return

    def _apply(self, p: Pass, edit: Replacement) -> None:
        """Carry out an edit, record it, and queue the layers whose matches may change."""
        used = [blob for layer in edit.layers for blob in layer.inputs]
        if self.names is None:
            self.names = Names(self.graph)
        before = refs(edit.layers)
        changed = carry_out(self.graph, edit, self.names, self.veto)
        before = tuple(ref for ref, layer in zip(before, edit.layers, strict=True) if layer.graph is not self.graph)
        self.applied.append(Applied(p.name, before, refs(edit.made)))
        for layer in edit.made:
            check_layer(layer)
        if self.check or p.is_foreign:
            self.graph.check()
        self._revisit(changed, used)

    def _revisit(self, layers: Iterable[Layer], used: Iterable[Blob]) -> None:
        """Queue every layer whose matches may differ: it follows a changed layer or blob within a pattern's depth."""
        changed = dict.fromkeys(layers)
        front = changed | dict.fromkeys(_near_users(used))
        seen = set(front)
        for distance in range(self.depth):
            for layer in front:
                for p in self._rules(layer):
                    if p.depth > distance:
                        self.queues[p].setdefault(layer)
            # A changed layer may be a kept layer in matches of all its users.
            after = [*_near_users(blob for layer in front for blob in layer.outputs)]
            after += [user for layer in changed for blob in layer.outputs for user in blob.users]
            front, changed = dict.fromkeys(user for user in after if user not in seen), {}
            seen.update(front)


@lru_cache(maxsize=8)
def _by_kinds(rewrites: tuple[Rewrite, ...]) -> dict[tuple[Kind, ...], list[Rewrite]]:
    """Return a table for `_Pipeline._rules`, which the runs of the same rewrites share."""
    return {}


def _near_users(blobs: Iterable[Blob]) -> Iterator[Layer]:
    for blob in blobs:
        if blob.uses <= _MOST_INNER_USES:
            yield from blob.users


def replacement(match: Match, result: Result) -> Replacement:
    """Turn the result of a rewrite for a match into an edit."""
    items = [result] if isinstance(result, Blob | Layer) else list(result)
    layers = match.layers[::-1]
    blobs = [item for item in items if isinstance(item, Blob)]
    if blobs:
        return Replacement(layers, reads=dict(zip(match.root.outputs, blobs, strict=True)))
    *added, last = (item for item in items if isinstance(item, Layer))
    return Replacement(
        layers, takes={match.root: last}, added=[(layer, match.root) for layer in added], sources=match.kept
    )
