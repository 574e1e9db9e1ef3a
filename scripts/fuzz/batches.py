"""Random models with a dynamic batch: if the importer proves that its items stay apart, they do.

    python -m scripts.fuzz.batches [--count 1000] [--seed 0]

Every axis of every input, and every axis that all inputs have, is made a dynamic batch in turn. If the batch is then
no part of the net (`onnx2ncnn_opt/onnx/items.py`), ONNX Runtime computes three items together and one by one. Prints
the differences, and ends with 1 if there are any.
"""

import argparse
import sys
from collections.abc import Mapping
from functools import partial

import numpy as np
import onnx

from onnx2ncnn_opt.ir.weight import Array
from scripts.fuzz import campaign
from testing.batches import ITEMS, choices, mixed_outputs
from testing.conformance import Outcome
from testing.random_steps import random_model

TOLERANCE = 2e-3  # rounding errors of a whole model


def feeds(model: onnx.ModelProto, *, known: Mapping[str, Array]) -> dict[str, Array]:
    """Return positive numbers, and integers of 0 and 1, in the shapes of `known` arrays except for the batch."""
    rng = np.random.default_rng(0)
    made = {}
    for value in model.graph.input:
        dims, like = value.type.tensor_type.shape.dim, known[value.name]
        shape = [ITEMS if dim.dim_param == "batch" else size for dim, size in zip(dims, like.shape, strict=True)]
        is_float = like.dtype.kind == "f"
        made[value.name] = (rng.uniform(0.1, 1.5, shape) if is_float else rng.integers(0, 2, shape)).astype(like.dtype)
    return made


def outcomes(given: argparse.Namespace) -> campaign.Judged:
    """Yield what became of each batch of each model."""
    for number in campaign.numbers(given):
        random = random_model(given.seed, number)
        model = random.proto()
        for axes in choices(model):
            mixed = mixed_outputs(model, axes, partial(feeds, known=random.feeds()[0]), rel=TOLERANCE)
            if mixed:
                yield number, Outcome("WRONG", f"a batch at {dict(axes)} mixes {', '.join(mixed)}"), 0.0
            else:
                yield number, Outcome("not proved, or refused" if mixed is None else "right"), 0.0


def main() -> int:
    """Run the command line."""
    return campaign.report(outcomes(campaign.arguments(__doc__, 1000).parse_args()))


if __name__ == "__main__":
    sys.exit(main())
