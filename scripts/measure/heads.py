"""Compare nets with a tail with the nets of the same models cut by hand: layers, and the time of their conversion.

    python -m scripts.measure.heads [-k yolo]

prints a line for each model of fixtures/heads that has a tail: the layers of both nets, and the shortest of three times
of both conversions, without and with verification.
"""

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from onnx2ncnn_opt import Verification, convert
from onnx2ncnn_opt.param.splits import count_layers

HEADS = Path(__file__).parents[2] / "fixtures" / "heads"


def shortest(*runs: Callable[[], Any]) -> tuple[list[float], list[Any]]:
    """Return the shortest of three times of each run, in seconds, and the results; the runs alternate."""
    seconds, results = [math.inf] * len(runs), [None] * len(runs)
    for _ in range(3):
        for number, run in enumerate(runs):
            start = time.perf_counter()
            results[number] = run()
            seconds[number] = min(seconds[number], time.perf_counter() - start)
    return seconds, results


def main() -> None:
    """Print a line for each model, and a sum."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-k", default="")
    wanted = parser.parse_args().k
    others, count, sums = 0, 0, [0.0] * 4
    print("model\tlayers\tby hand\ts\tby hand\tverified s\tby hand")
    for path in sorted(path for path in HEADS.glob("*.onnx") if wanted in path.name):
        times: list[float] = []
        layers: list[int] = []
        cut = convert(path, verification=None).cut
        if not cut:
            continue
        by_hand: dict[str, Any] = {"outputs": cut, "tail": "never"}
        for how in (None, Verification()):
            seconds, made = shortest(*(partial(convert, path, verification=how, **o) for o in ({}, by_hand)))
            times += seconds
            layers += [count_layers(each.graph) for each in made]
        others, count = others + (layers[0] != layers[1]), count + 1
        sums = [a + b for a, b in zip(sums, times, strict=True)]
        print(path.stem, layers[0], layers[1], *(f"{seconds:.2f}" for seconds in times), sep="\t", flush=True)
    print(f"{count} models, {others} with other layers", "", "", *(f"{seconds:.1f}" for seconds in sums), sep="\t")


if __name__ == "__main__":
    main()
