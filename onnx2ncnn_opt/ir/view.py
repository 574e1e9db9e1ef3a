"""The layout of a tensor in a Mat of at most four dims, and the layers that change the layout.

A tensor's axes are factorised into atoms: parts of axes that have stayed together so far. The Mat holds the atoms
in memory order, grouped into dims (after those of the batch count). The tensor's axes hold the same atoms in the
tensor's order. Reshape, Squeeze, Transpose and their chains only regroup atoms, so they need no layers. If a layer
needs the Mat in a certain layout, `plan` returns the fewest Reshape and Permute layers that lead there. Axes of size 1
have no atoms, so they can be added, dropped and moved freely.

Any permutation of any number of atoms is a product of permutations of at most four blocks, so `plan` reaches every
layout, for any rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise, permutations
from itertools import product as choices
from typing import Any, NamedTuple, TypeAlias, TypeVar

from onnx2ncnn_opt.ir.dim import Dim, Shape, Sym, by_axis, exact_div, product
from onnx2ncnn_opt.ir.permute import inverted, order_type

MAX_DIMS = 4
_MANY_STEPS = 4  # a plan around a shuffle has two or more
# The parameters for the block and the mode of a `Shuffle`.
_SHUFFLES = {"ShuffleChannel": ("group", ""), "PixelShuffle": ("upscale_factor", "mode"), "Reorg": ("stride", "mode")}


@dataclass(eq=False, slots=True)
class Atom:
    """A factor of a tensor's axes; its identity is the object."""

    size: Dim


Atoms: TypeAlias = tuple[Atom, ...]
Dims: TypeAlias = tuple[Atoms, ...]
_Order: TypeAlias = tuple[int, ...]
_Item = TypeVar("_Item")


def sizes(groups: Iterable[Atoms]) -> Shape:
    """Return the size of each group of atoms."""
    return tuple(product(atom.size for atom in group) for group in groups)


def flat(groups: Iterable[Atoms]) -> Atoms:
    """Return all atoms of the groups, in order."""
    return tuple(atom for group in groups for atom in group)


class Regroup(NamedTuple):
    """A Reshape layer: `dims` of the result, and whether the batch is folded in (`unbatch`) or taken out (`batch`).

    With `batch` not None the result's Mat has that batch count, and it comes before `dims` in memory.
    """

    dims: Shape
    unbatch: bool = False
    batch: Dim | None = None

    @property
    def whole(self) -> Shape:
        """The sizes in the layer's parameters: a new batch before the dims."""
        return self.dims if self.batch is None else (self.batch, *self.dims)

    @property
    def batch_axes(self) -> dict[str, int]:
        """The layer's parameters about the batch."""
        is_set = {"input_batch_axis": self.unbatch, "output_batch_axis": self.batch is not None}
        return {name: 0 for name, value in is_set.items() if value}


class Reorder(NamedTuple):
    """A Permute layer: result dim i is dim ``perm[i]`` of the operand."""

    perm: tuple[int, ...]


class Shuffle(NamedTuple):
    """A layer made for one regrouping of channels and image: its type, its block (or group), and its mode."""

    type: str
    block: int
    mode: int = 0


Step: TypeAlias = Regroup | Reorder | Shuffle


def step_layer(step: Step) -> tuple[str, dict[str, Any]]:
    """Return the type and the parameters of a step's layer; one dynamic size is -1, which ncnn computes.

    A Reshape to several dynamic sizes, or to more than four (the batch included), needs expressions.
    """
    if isinstance(step, Reorder):
        return "Permute", {"order_type": order_type(step.perm)}
    if isinstance(step, Shuffle):
        block, mode = _SHUFFLES[step.type]
        return step.type, {block: step.block} | ({mode: step.mode} if step.mode else {})
    sizes = {axis: -1 if isinstance(size, Sym) else size for axis, size in by_axis(step.whole).items()}
    return "Reshape", sizes | step.batch_axes


class View(NamedTuple):
    """A tensor over a Mat: `batch` and `dims` are the Mat's atoms in memory order, `axes` the tensor's."""

    batch: Atoms
    dims: Dims
    axes: Dims

    @classmethod
    def of(cls, shape: Shape, dims: Sequence[Sequence[int]], batch: Sequence[int] = ()) -> View:
        """Return a view of a new tensor; `dims` and `batch` list the axes of each Mat dim and of the batch.

        Axes that are in no group must have size 1.
        """
        axes = tuple((Atom(size),) if size != 1 else () for size in shape)
        view = cls(flat(axes[a] for a in batch), tuple(flat(axes[a] for a in group) for group in dims), axes)
        assert set(flat(axes)) == set(view.batch) | set(flat(view.dims)), "an axis of the tensor is nowhere in the Mat"
        return view

    @property
    def shape(self) -> Shape:
        """The tensor's shape."""
        return sizes(self.axes)

    @property
    def mat_shape(self) -> Shape:
        """The Mat's dims, outermost first."""
        return sizes(self.dims)

    def dim_of(self, axis: int) -> int | None:
        """Return the Mat dim that is exactly this axis; None if the axis is spread, shared or of size 1."""
        atoms = self.axes[axis]
        return next((i for i, group in enumerate(self.dims) if group == atoms), None) if atoms else None

    def transpose(self, perm: Sequence[int]) -> View:
        """Return the tensor with its axes permuted as ONNX Transpose does."""
        return View(self.batch, self.dims, tuple(self.axes[p] for p in perm))

    def with_axes(self, axes: Iterable[Atoms]) -> View:
        """Return the same Mat under other axes, made of the same atoms."""
        return View(self.batch, self.dims, tuple(axes))

    def split(self, atom: Atom, *factors: Dim) -> View:
        """Return the view with an atom replaced by factors of it, outermost first."""
        return self.with_parts(atom, tuple(Atom(size) for size in factors if size != 1))

    def with_parts(self, atom: Atom, parts: Atoms) -> View:
        """Return the view with an atom replaced by parts of it, outermost first."""
        dims, axes = (tuple(_replace(group, atom, parts) for group in groups) for groups in (self.dims, self.axes))
        return View(_replace(self.batch, atom, parts), dims, axes)

    def reshape(self, shape: Shape) -> View | None:
        """Return the tensor under a new shape of the same size, by regrouping its atoms or factors of them.

        None if a boundary of the new axes lies in an atom that cannot be split there.
        """
        view, left = self, list(flat(self.axes))
        axes: list[Atoms] = []
        for size in shape:
            group: list[Atom] = []
            while size != 1:
                if not left:
                    return None
                atom = left.pop(0)
                rest = exact_div(size, atom.size)
                if rest is None:  # the axis ends inside the atom
                    inner = exact_div(atom.size, size)
                    if inner is None:
                        return None
                    head, tail = Atom(size), Atom(inner)
                    view = view.with_parts(atom, (head, tail))
                    left.insert(0, tail)
                    atom, rest = head, 1
                group.append(atom)
                size = rest
            axes.append(tuple(group))
        return view.with_axes(axes) if not left else None


def _replace(group: Atoms, atom: Atom, parts: Atoms) -> Atoms:
    return flat(parts if a is atom else (a,) for a in group)


def refine(a: View, axis_a: int, b: View, axis_b: int) -> tuple[View, View] | None:
    """Return both views with the atoms of two equally long axes cut at the same points; None if that is impossible."""
    i = 0
    while i < min(len(a.axes[axis_a]), len(b.axes[axis_b])):
        left, right = a.axes[axis_a][i], b.axes[axis_b][i]
        if left.size != right.size:
            inner = exact_div(right.size, left.size)
            if inner is not None:
                b = b.split(right, left.size, inner)
            elif (inner := exact_div(left.size, right.size)) is not None:
                a = a.split(left, right.size, inner)
            else:
                return None
        i += 1
    return (a, b) if len(a.axes[axis_a]) == len(b.axes[axis_b]) else None


def plan(view: View, dims: Dims, batch: Atoms = ()) -> list[Step]:
    """Return the fewest layers that bring the view's Mat into `dims` and `batch`, which hold every atom once."""
    old, new = view.batch + flat(view.dims), batch + flat(dims)
    assert set(old) == set(new), "the wanted layout does not hold the tensor's atoms"
    assert len(dims) <= MAX_DIMS, "a Mat has at most four dims"
    if (view.batch, view.dims) == (batch, dims):
        return []
    out_batch = product(a.size for a in batch) if batch else None
    if view.batch == batch:
        if flat(view.dims) == flat(dims):
            return [Regroup(sizes(dims))]
        shuffle = _shuffle(view.dims, dims)
        if shuffle is not None:
            return [shuffle]
        steps = _permutation(flat(view.dims), flat(dims), view.dims, dims)
        return steps if len(steps) < _MANY_STEPS else min([steps, *_around_shuffles(view, dims)], key=len)
    if old == new:
        return [Regroup(sizes(dims), unbatch=bool(view.batch), batch=out_batch)]
    steps = _permutation(old, new, None if view.batch else view.dims, None if batch else dims)
    if view.batch:
        first = steps[0]
        assert isinstance(first, Regroup)
        steps[0] = Regroup(first.dims, unbatch=True)
    if batch:
        steps.append(Regroup(sizes(dims), batch=out_batch))
    return steps


def _shuffle(old: Dims, new: Dims) -> Shuffle | None:
    """Return the ShuffleChannel, PixelShuffle or Reorg that does the whole step; None if there is none."""
    if len(old) in (3, 4) and old[1:] == new[1:]:
        cut = next((i for i in range(1, len(old[0])) if old[0][i:] + old[0][:i] == new[0]), None)
        group = product(atom.size for atom in old[0][:cut]) if cut else None
        return Shuffle("ShuffleChannel", group) if isinstance(group, int) else None
    if not len(old) == len(new) == 3:
        return None
    return _pixel_shuffle("PixelShuffle", old, new) or _pixel_shuffle("Reorg", new, old)


def _pixel_shuffle(type: str, deep: Dims, wide: Dims) -> Shuffle | None:
    """Return the layer if the rows and columns of `wide` are those of `deep`, each followed by channels of `deep`."""
    rows, columns = (wide[i][len(deep[i]) :] if wide[i][: len(deep[i])] == deep[i] else () for i in (1, 2))
    height, width = (product(atom.size for atom in atoms) for atoms in (rows, columns))
    if not rows or not columns or height != width or not isinstance(height, int):
        return None
    for mode, channels in enumerate((wide[0] + rows + columns, rows + columns + wide[0])):
        if channels == deep[0]:
            return Shuffle(type, height, mode)
    return None


def _around_shuffles(view: View, dims: Dims) -> Iterator[list[Step]]:
    """Yield plans that begin with Reorg, as patches of an image become tokens, or that end with PixelShuffle."""
    for deep, shuffle in _shuffles("Reorg", view.dims):
        yield [shuffle, *plan(view._replace(dims=deep), dims, view.batch)]
    for deep, shuffle in _shuffles("PixelShuffle", dims):
        yield [*plan(view, deep, view.batch), shuffle]


def _shuffles(type: str, wide: Dims) -> Iterator[tuple[Dims, Shuffle]]:
    """Yield the dims that a layer exchanges with `wide`, by moving parts of the rows and columns to the channels."""
    if len(wide) != 3:
        return
    for i, j in choices(range(1, len(wide[1])), range(1, len(wide[2]))):
        rows, columns = wide[1][i:], wide[2][j:]
        for channels in (wide[0] + rows + columns, rows + columns + wide[0]):
            deep = channels, wide[1][:i], wide[2][:j]
            shuffle = _pixel_shuffle(type, deep, wide)
            if shuffle is not None:
                yield deep, shuffle


def _permutation(old: Atoms, new: Atoms, source: Dims | None, target: Dims | None) -> list[Step]:
    """Return the layers that lead from one order of atoms to another.

    `source` and `target` are the dims before and after; None if a Reshape is there anyway. The caller adds the last.
    """
    blocks = runs(old, new)
    options: list[list[Step]] = []
    if len(blocks) <= MAX_DIMS:
        if source is not None:
            options.extend(_direct(source, new, target))
        if target is not None and _are_runs(target, old):
            order = sorted(range(len(target)), key=lambda i: old.index(target[i][0]) if target[i] else -1)
            options.append([Regroup(sizes(target[i] for i in order)), Reorder(inverted(order))])
    options.append(_by_blocks(blocks, old, target))
    return min(options, key=len)


def runs(old: Atoms, new: Atoms) -> list[Atoms]:
    """Cut `new` into the longest runs that also stand together in `old`."""
    position = {atom: i for i, atom in enumerate(old)}
    blocks: list[list[Atom]] = []
    for atom in new:
        if blocks and position[blocks[-1][-1]] + 1 == position[atom]:
            blocks[-1].append(atom)
        else:
            blocks.append([atom])
    return [tuple(block) for block in blocks]


def _are_runs(groups: Dims, order: Atoms) -> bool:
    position = {atom: i for i, atom in enumerate(order)}
    return all(position[a] + 1 == position[b] for group in groups for a, b in pairwise(group))


def _direct(source: Dims, new: Atoms, target: Dims | None) -> Iterator[list[Step]]:
    """Yield a Permute on the dims as they are, and a Reshape after it if the dims are not yet the target's."""
    for perm in permutations(range(len(source))):
        dims = tuple(source[p] for p in perm)
        if flat(dims) == new:
            steps: list[Step] = [Reorder(perm)]
            if target is not None and dims != target:
                steps.append(Regroup(sizes(target)))
            yield steps


def _by_blocks(blocks: list[Atoms], old: Atoms, target: Dims | None) -> list[Step]:
    """Return a Reshape to the moving blocks, a Permute (several for more than four blocks), and a last Reshape."""
    start = sorted(blocks, key=lambda block: old.index(block[0]))
    order = tuple(blocks.index(block) for block in start)
    steps: list[Step] = []
    for cuts, perm in _moves(order):
        segments = _cut(start, cuts)
        steps += [Regroup(tuple(product(sizes(segment)) for segment in segments)), Reorder(perm)]
        start = [block for p in perm for block in segments[p]]
        dims = tuple(flat(segments[p]) for p in perm)
    if target is not None and dims != target:
        steps.append(Regroup(sizes(target)))
    return steps


def _cut(items: Sequence[_Item], cuts: Sequence[int]) -> list[Sequence[_Item]]:
    return [items[i:j] for i, j in pairwise((0, *cuts, len(items)))]


@lru_cache(maxsize=1024)
def _moves(order: _Order) -> tuple[tuple[_Order, _Order], ...]:
    """Return the fewest permutations of at most four runs that sort `order`, each with its cut points and its perm."""
    if len(order) > 6:
        return _moves_greedy(order)
    goal = tuple(sorted(order))
    reached: dict[_Order, tuple[tuple[_Order, _Order], ...]] = {order: ()}
    states = deque([order])
    while goal not in reached:
        state = states.popleft()
        for cuts, perm in _options(len(state)):
            moved = _moved(state, cuts, perm)
            if moved not in reached:
                reached[moved] = (*reached[state], (cuts, perm))
                states.append(moved)
    return reached[goal]


def _options(length: int) -> Iterator[tuple[_Order, _Order]]:
    for count in range(1, min(MAX_DIMS, length)):
        yield from choices(combinations(range(1, length), count), permutations(range(count + 1)))


def _moved(order: _Order, cuts: _Order, perm: _Order) -> _Order:
    segments = _cut(order, cuts)
    return tuple(x for p in perm for x in segments[p])


def _moves_greedy(order: _Order) -> tuple[tuple[_Order, _Order], ...]:
    """Move one block to its position at a time: not the fewest moves, but fast enough for any number of blocks."""
    moves = []
    for position, block in enumerate(sorted(order)):
        index = order.index(block)
        if index == position:
            continue
        cuts = tuple(c for c in (position, index, index + 1) if 0 < c < len(order))
        first = 1 if position else 0
        perm = list(range(len(cuts) + 1))
        perm.insert(first, perm.pop(first + 1))
        moves.append((cuts, tuple(perm)))
        order = _moved(order, *moves[-1])
    return tuple(moves)
