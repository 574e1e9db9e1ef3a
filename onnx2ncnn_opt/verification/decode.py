"""The runs of a decoder: prompts of several lengths, whole and in chunks, and greedy tokens after each.

ONNX Runtime chooses the tokens, and ncnn gets the same. Each keeps its own caches from step to step.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.errors import CrashError, RunError
from onnx2ncnn_opt.inputs.draws import Draw, draw_inputs, dynamic_sizes
from onnx2ncnn_opt.manifest import Manifest
from onnx2ncnn_opt.onnx.read.load import LoadedModel
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.runtime.base import Array, Step
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.runtime.slots import Slot, StepFeeds, np_dtype
from onnx2ncnn_opt.runtime.steps import StepInputs
from onnx2ncnn_opt.verification.model_runs import Run

TOKENS = 16  # after each prompt
PROMPT = 64  # tokens, to measure times
_FAR = 2**17  # tokens: the last one of a model whose positions do not end
_Caches = Mapping[str, tuple[Array, int]]  # each with its axis of tokens


class Plan(NamedTuple):
    """A prompt in chunks. With `hides` the mask hides its second token, to show that the net reads the mask."""

    chunks: tuple[int, ...]
    hides: bool = False


# The longest steps come first, because the time may be over before the last ones.
_PLANS = (Plan((7,)), Plan((16, 1, 16)), Plan((1,)), Plan((33,)), Plan((3, 4)), Plan((7,), hides=True))
_FIXED_CHUNKS = 4  # for models with a fixed number of tokens
DECODER_RUNS = sum(len(plan.chunks) + TOKENS for plan in _PLANS[:2])


class Decoder:
    """A model with caches, and its `runner` in ONNX Runtime. Raises UsageError if it cannot run step by step."""

    def __init__(self, model: LoadedModel, manifest: Manifest, seed: int, runner: OrtRunner | None = None) -> None:
        self._manifest, self._seed, self._runner = manifest, seed, runner
        self._inputs = StepInputs.of(manifest)
        drawn = draw_inputs(model, draw=Draw(seed, plain=True))
        self._others = {entry.name: drawn[entry.name] for entry in self._inputs.others}
        self._sizes = dynamic_sizes(model)
        # The mask of GroupQueryAttention is the number of tokens, and hides none.
        self._counts = any(node.op_type == "GroupQueryAttention" for node in model.graph)
        self.tokens = None if self._inputs.scores is None else self._inputs.scores.name

    def steps(self) -> tuple[Step, Step]:
        """Return the net's feeds of a prompt, and of a token after it."""
        random, count = np.random.default_rng(self._seed), self._inputs.fixed or min(PROMPT, self._longest - 1)
        prompt = self._feeds(self._draw_ids(random, count), self._blank_caches(0), 0, None)
        token = self._feeds(self._draw_ids(random, self._inputs.fixed or 1), prompt.pasts, count, prompt)
        slots = [Slot.of(entry) for entry in self._manifest.fed]
        return prompt.step(slots), token.step(slots)

    def all_steps(self) -> tuple[Step, Step, Step]:
        """Return these steps, and that of the last two tokens that have positions: without caches, for masks alone."""
        count = self._inputs.fixed or 2
        past = min(self._longest, _FAR) - count
        last = self._feeds(np.zeros(count), self._blank_caches(past), past, None)
        return *self.steps(), Step(last.step([Slot.of(entry) for entry in self._manifest.fed]), (), past)

    def runs(self) -> Iterator[Run]:
        """Yield all steps; an error of ONNX Runtime ends a prompt early. Raises the error of the first prompt."""
        fixed = self._inputs.fixed
        most = TOKENS if fixed in (None, 1) else 0
        for number, plan in enumerate(_PLANS if fixed is None else [Plan((fixed,) * _FIXED_CHUNKS)]):
            count = sum(plan.chunks)
            if count >= self._longest or (plan.hides and (self._counts or self._inputs.mask is None)):
                continue
            try:
                yield from self._session(number, plan, min(most, self._longest - count))
            except CrashError:
                raise
            except RunError:
                if number == 0:
                    raise

    @property
    def _longest(self) -> int:
        return self._inputs.most or 2**31

    def _session(self, number: int, plan: Plan, tokens: int) -> Iterator[Run]:
        assert self._runner is not None
        random = np.random.default_rng([self._seed, number])
        presents = {e.cache.in_: e.name for e in self._manifest.outputs if e.cache}
        pasts, past, before = self._blank_caches(0), 0, None
        prompt = f"prompt of {sum(plan.chunks)}" + (" with its second token hidden" if plan.hides else "")
        for step, count in enumerate((*plan.chunks, *[1] * tokens)):
            token = step + 1 - len(plan.chunks)
            if token <= 0 or self.tokens is None or self._inputs.ids.element != "int32":  # or an embedding
                ids = self._draw_ids(random, count)
            feeds = self._feeds(ids, pasts, past, before, hides=plan.hides)
            part = f"chunk {step + 1} of a " if len(plan.chunks) > 1 else ""
            label = f"token {token} after a {prompt}" if token > 0 else part + prompt
            announce(f"ONNX Runtime runs the model, {label}")
            results = self._runner.run(feeds)
            pasts.update({name: (results[out], pasts[name][1]) for name, out in presents.items()})
            yield Run({}, None, feeds, {n: a for n, a in results.items() if n not in presents.values()}, label)
            if self.tokens is not None:
                ids = results[self.tokens].reshape(-1, results[self.tokens].shape[-1])[-1:].argmax(-1)
            before, past = feeds, past + count

    def _feeds(
        self, ids: Array, pasts: _Caches, past: int, before: StepFeeds | None, *, hides: bool = False
    ) -> StepFeeds:
        arrays = self._inputs.arrays(ids.astype(np_dtype(self._inputs.ids)), past)
        if hides and self._inputs.mask is not None:
            arrays[self._inputs.mask.name][..., 1] = 0
        return StepFeeds({**self._others, **arrays}, pasts, past, self._manifest.caches, before)

    def _blank_caches(self, rows: int) -> dict[str, tuple[Array, int]]:
        """Return caches of so many rows of zeros, each with its token axis."""
        caches = {}
        for entry in (e for e in self._manifest.inputs if e.cache):
            axis = next((i for i, size in enumerate(entry.shape) if not isinstance(size, int)), len(entry.shape) - 2)
            shape = [size if isinstance(size, int) else self._sizes.get(str(size), 1) for size in entry.shape]
            shape[axis] = rows
            caches[entry.name] = np.broadcast_to(np.zeros((), np_dtype(entry)), shape), axis
        return caches

    def _draw_ids(self, random: np.random.Generator, count: int) -> Array:
        entry = self._inputs.ids
        if entry.element == "int32":
            return random.integers(0, entry.table or 2, count)
        width = entry.shape[-1]
        return random.standard_normal((count, width if isinstance(width, int) else 1))
