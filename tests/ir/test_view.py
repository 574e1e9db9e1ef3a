"""The view algebra against numpy: whatever the plan, the elements end up where they belong."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx2ncnn_opt.ir.dim import Dim, symbol
from onnx2ncnn_opt.ir.view import MAX_DIMS, Atom, Atoms, Dims, Regroup, Reorder, Shuffle, Step, View, flat, plan, sizes
from onnx2ncnn_opt.ir.weight import Array
from testing import present

SETTINGS = settings(derandomize=True, deadline=None, max_examples=150)


def execute(mat: Array, batched: bool, steps: Sequence[Step]) -> Array:
    """Return a Mat's elements after the layers; a batch is the array's first axis."""
    for step in steps:
        lead = mat.shape[:1] if batched else ()
        if isinstance(step, Reorder):
            assert len(step.perm) <= MAX_DIMS
            mat = mat.transpose((0, *(p + 1 for p in step.perm)) if batched else step.perm)
        elif isinstance(step, Shuffle):
            mat = np.stack([shuffle(item, step) for item in mat]) if batched else shuffle(mat, step)
        else:
            assert len(step.dims) <= MAX_DIMS
            if step.batch is not None:
                lead, batched = (step.batch,), True
            elif step.unbatch:
                lead, batched = (), False
            mat = mat.reshape((*lead, *step.dims))
    return mat


def shuffle(x: Array, step: Shuffle) -> Array:
    """ShuffleChannel, PixelShuffle and Reorg as ncnn documents them."""
    b = step.block
    if step.type == "ShuffleChannel":
        return x.reshape(b, x.shape[0] // b, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
    if step.type == "PixelShuffle":
        c, h, w = x.shape[0] // (b * b), *x.shape[1:]
        if step.mode == 0:
            return x.reshape(c, b, b, h, w).transpose(0, 3, 1, 4, 2).reshape(c, h * b, w * b)
        return x.reshape(b, b, c, h, w).transpose(2, 3, 0, 4, 1).reshape(c, h * b, w * b)
    c, h, w = x.shape[0], x.shape[1] // b, x.shape[2] // b
    parts = x.reshape(c, h, b, w, b)
    return parts.transpose((0, 2, 4, 1, 3) if step.mode == 0 else (2, 4, 0, 1, 3)).reshape(c * b * b, h, w)


@st.composite
def forms(draw: st.DrawFn, atoms: Sequence[Atom], most: int = 2) -> tuple[Atoms, Dims]:
    """A batch of at most so many atoms, and dims that hold all others, in any order, with empty dims too."""
    order = draw(st.permutations(atoms))
    batch = draw(st.integers(0, min(most, len(atoms))))
    cuts = sorted(draw(st.lists(st.integers(batch, len(atoms)), max_size=MAX_DIMS - 1)))
    edges = [batch, *cuts, len(atoms)]
    return tuple(order[:batch]), tuple(tuple(order[i:j]) for i, j in pairwise(edges))


@st.composite
def journeys(draw: st.DrawFn) -> tuple[View, Dims, Atoms]:
    atoms = [Atom(size) for size in draw(st.lists(st.sampled_from([2, 2, 3]), max_size=7))]
    batch, dims = draw(forms(atoms))
    to_batch, to_dims = draw(forms(atoms))
    if draw(st.booleans()):  # most nets keep their batch
        to_batch, (_, to_dims) = batch, draw(forms([atom for atom in atoms if atom not in batch], most=0))
    return View(batch, dims, tuple((atom,) for atom in atoms)), to_dims, to_batch


def fixed(*sizes: Dim) -> list[int]:
    return [size for size in sizes if isinstance(size, int)]


def mat_of(view: View, batch: Atoms, dims: Dims) -> Array:
    atoms = flat(view.axes)
    shape = fixed(*(a.size for a in atoms))
    tensor = np.arange(math.prod(shape)).reshape(shape)
    lead = [math.prod(fixed(*(a.size for a in batch)))] if batch else []
    return tensor.transpose([atoms.index(a) for a in batch + flat(dims)]).reshape([*lead, *fixed(*sizes(dims))])


@given(journeys())
@SETTINGS
def test_a_plan_moves_every_element_where_it_belongs(journey: tuple[View, Dims, Atoms]) -> None:
    view, dims, batch = journey
    steps = plan(view, dims, batch)
    result = execute(mat_of(view, view.batch, view.dims), bool(view.batch), steps)
    np.testing.assert_array_equal(result, mat_of(view, batch, dims))
    assert not plan(View(batch, dims, view.axes), dims, batch)


def test_many_blocks_in_reverse_order() -> None:
    atoms = [Atom(2) for _ in range(9)]
    view = View((), (tuple(atoms),), tuple((a,) for a in atoms))
    dims = (tuple(reversed(atoms)),)
    steps = plan(view, dims)
    np.testing.assert_array_equal(execute(mat_of(view, (), view.dims), False, steps), mat_of(view, (), dims))


@pytest.mark.parametrize(
    ("shape", "order", "result", "step"),
    [
        ((2, 3, 5, 7), (1, 0, 2, 3), (6, 5, 7), Shuffle("ShuffleChannel", 2)),
        ((4, 2, 2, 3, 5), (0, 3, 1, 4, 2), (4, 6, 10), Shuffle("PixelShuffle", 2)),
        ((2, 2, 4, 3, 5), (2, 3, 0, 4, 1), (4, 6, 10), Shuffle("PixelShuffle", 2, 1)),
        ((4, 3, 2, 5, 2), (0, 2, 4, 1, 3), (16, 3, 5), Shuffle("Reorg", 2)),
        ((4, 3, 2, 5, 2), (2, 4, 0, 1, 3), (16, 3, 5), Shuffle("Reorg", 2, 1)),
    ],
)
def test_shuffles_are_one_layer(
    shape: tuple[int, ...], order: tuple[int, ...], result: Sequence[int], step: Step
) -> None:
    """Exported as Reshape, Transpose, Reshape; ncnn has a layer for the three."""
    channels = {5: [[0, 1, 2], [3], [4]], 4: [[0, 1], [2], [3]]}[len(shape)]
    if isinstance(step, Shuffle) and step.type == "Reorg":
        channels = [[0], [1, 2], [3, 4]]
    view = present(View.of(shape, channels).transpose(order).reshape(tuple(result)))
    assert plan(view, view.axes) == [step]


@pytest.mark.parametrize(("ends", "shuffle"), [(1, Shuffle("Reorg", 2, 1)), (-1, Shuffle("PixelShuffle", 2, 1))])
def test_patches_with_a_batch_become_tokens_and_back(ends: int, shuffle: Shuffle) -> None:
    """As in diffusion transformers: the layers around the shuffle keep the batch."""
    image = View.of((3, 5, 4, 2, 6, 2), [[1], [2, 3], [4, 5]], [0])
    (n,), (c,), (h,), (i,), (w,), (j,) = image.axes
    start, end = [image.dims, ((h, w), (i, j, c))][::ends]
    view = image._replace(dims=start)
    steps = plan(view, end, (n,))
    assert len(steps) == 3
    assert shuffle in steps
    np.testing.assert_array_equal(execute(mat_of(view, (n,), start), True, steps), mat_of(view, (n,), end))


def test_regroupings_and_axes_of_one_cost_nothing() -> None:
    view = View.of((1, 6, 4, 5), [[1], [2], [3]], [0])
    again = present(view.reshape((6, 20)) and view.reshape((1, 2, 3, 1, 20)))
    moved = present(again.transpose((3, 1, 2, 0, 4)).reshape((6, 1, 4, 5)))
    assert plan(moved, (moved.axes[0], moved.axes[2], moved.axes[3])) == []


def test_a_transpose_is_one_permute_and_a_merge_one_reshape() -> None:
    view = View.of((3, 4, 5), [[0], [1], [2]])
    turned = view.transpose((2, 0, 1))
    assert plan(turned, turned.axes) == [Reorder((2, 0, 1))]
    assert plan(view, (flat(view.axes),)) == [Regroup((60,))]


def test_reshape_refuses_sizes_that_do_not_factor() -> None:
    assert View.of((6, 4), [[0], [1]]).reshape((8, 3)) is None
    assert View.of((6, 4), [[0], [1]]).reshape((5, 5)) is None


def test_symbolic_sizes_are_split_and_merged() -> None:
    h = symbol("h")
    view = View.of((1, 6, h * 4, 5), [[1], [2], [3]], [0])
    parts = present(view.reshape((6, h, 4, 5)))
    assert parts.shape == (6, h, 4, 5)
    whole = present(parts.reshape((6, h * 20)))
    assert whole.shape == (6, h * 20)
