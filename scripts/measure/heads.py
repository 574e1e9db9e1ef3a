"""Compare nets with a tail with the nets of the same models cut by hand: layers, and the time of their conversion.

    python -m scripts.measure.heads [-k yolo]

prints a line for each model of fixtures/heads that has a tail: the layers of both nets, and the shortest of three times
of both conversions, without and with verification.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from onnx2ncnn_opt import Verification, convert
from onnx2ncnn_opt.param.splits import count_layers

HEADS = Path(__file__).parents[2] / "fixtures" / "heads"


def shortest(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the shortest of three times, in seconds, and the result."""
    times, result = [], None
    for _ in range(3):
        start = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - start)
    return min(times), result


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
            for options in ({}, by_hand):
                seconds, made = shortest(partial(convert, path, verification=how, **options))
                times.append(seconds)
                layers.append(count_layers(made.graph))
        others, count = others + (layers[0] != layers[1]), count + 1
        sums = [a + b for a, b in zip(sums, times, strict=True)]
        print(path.stem, layers[0], layers[1], *(f"{seconds:.2f}" for seconds in times), sep="\t", flush=True)
    print(f"{count} models, {others} with other layers", "", "", *(f"{seconds:.1f}" for seconds in sums), sep="\t")


if __name__ == "__main__":
    main()
