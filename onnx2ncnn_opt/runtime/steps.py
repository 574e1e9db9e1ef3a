"""The steps of a decoder: mask, positions and ids for the new tokens after a number of past ones."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.manifest import Entry, Manifest, limit_of
from onnx2ncnn_opt.onnx.read.given import parsed_size
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.slots import np_dtype

# The names that exporters give to these inputs of a decoder.
_IDS = ("input_ids", "decoder_input_ids", "inputs_embeds", "ids", "tokens")
_MASKS = ("attention_mask", "decoder_attention_mask")
_POSITIONS = ("position_ids", "decoder_position_ids", "cache_position", "positions")


class StepInputs(NamedTuple):
    """The inputs of a decoder's step; the caller provides `others`, the step makes the rest."""

    ids: Entry
    mask: Entry | None
    positions: Entry | None
    others: tuple[Entry, ...]
    scores: Entry | None  # the output whose last row has the scores of the next token
    most: int | None  # the number of tokens for which the model has positions

    @classmethod
    def of(cls, manifest: Manifest) -> "StepInputs":
        """Find the inputs by name and type; UsageError if none takes tokens, or a past is not a cache."""
        entries = [entry for entry in manifest.model_inputs if entry.cache is None]
        by_name = {entry.name: entry for entry in entries}
        lengths = {size for entry in manifest.inputs if entry.cache for size in entry.shape if isinstance(size, str)}
        if plain := [entry.name for entry in entries if len(entry.shape) > 2 and lengths.intersection(entry.shape)]:
            raise UsageError(f"the net has a past that is no cache, so it cannot start without one: {', '.join(plain)}")

        def first(names: Collection[str], rank: int) -> Entry | None:
            return next((by_name[name] for name in names if name in by_name and len(by_name[name].shape) <= rank), None)

        mask, positions = first(_MASKS, 2), first(_POSITIONS, 2)
        integers = [entry for entry in entries if entry.element == "int32" and entry not in (mask, positions)]
        ids = first(_IDS, 3) or (integers[0] if len(integers) == 1 else None)
        if ids is None:
            raise UsageError(f"no input takes tokens: they are {', '.join(by_name) or 'none'}, and none is input_ids")
        floats = [e for e in manifest.read if len(e.shape) > 1 and "float" in e.dtype]
        scores = next((e for e in floats if e.name == "logits"), floats[0] if floats else None)
        others = tuple(e for e in entries if e not in (ids, mask, positions))
        return cls(ids, mask, positions, others, scores, _most(manifest, ids, positions))

    @property
    def fixed(self) -> int | None:
        """The number of tokens of each step; None if it is dynamic."""
        size = self.ids.shape[0 if len(self.ids.shape) == 1 else 1]
        return size if isinstance(size, int) else None

    def arrays(self, ids: Array, past: int) -> dict[str, Array]:
        """Return the ids, mask and positions of a step after `past` tokens; the mask hides no token."""
        axis = 0 if len(self.ids.shape) == 1 else 1
        ids = np.asarray(ids)
        if axis and len(self.ids.shape) == ids.ndim + 1:
            ids = ids[None]
        if ids.ndim != len(self.ids.shape) or not ids.size:
            raise UsageError(f"a step takes {self.ids}, not an array of shape {list(ids.shape)}")
        batch, new = ids.shape[:axis], ids.shape[axis]
        arrays = {self.ids.name: ids}
        if self.mask is not None:
            arrays[self.mask.name] = np.ones((*batch, past + new)[-len(self.mask.shape) :], np_dtype(self.mask))
        if self.positions is not None:
            numbers = np.arange(past, past + new, dtype=np_dtype(self.positions))
            shape = (*batch, new)[-len(self.positions.shape) :]
            arrays[self.positions.name] = np.broadcast_to(numbers, shape)
        return arrays

    def rows(self, arrays: Mapping[str, Array]) -> int:
        """Return the number of tokens of a step."""
        return int(arrays[self.ids.name].shape[0 if len(self.ids.shape) == 1 else 1])


def _most(manifest: Manifest, ids: Entry, positions: Entry | None) -> int | None:
    """Return the largest number of tokens that the model's tables allow; None without a limit."""
    new = [size for size in ids.shape if isinstance(size, str)]
    pasts = {size for entry in manifest.inputs if entry.cache for size in entry.shape if isinstance(size, str)}
    limits = [positions.table] if positions is not None and positions.table else []
    for text, least in manifest.minimum.items():
        limit = parsed_size(text, {**dict.fromkeys(pasts, 0), **dict.fromkeys(new, least)})
        if limit_of(text, least)[0] != text and isinstance(limit, int):
            limits.append(limit)
    return min(limits, default=None)
