"""Compare nets with a tail with the nets of the same models cut by hand: layers, and the time of their conversion.

    python -m scripts.measure.heads [-k yolo] [--no-verify]

prints a line for each model of fixtures/heads that has a tail: the layers of both nets, the CPU seconds of both
conversions without verification, and the seconds with it. Both alternate, and the shortest of three times counts.
Verification of a net with a tail also runs and compares the tail, in NumPy and in C++.
"""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onnx2ncnn_opt import Verification, convert
from onnx2ncnn_opt.param.splits import count_layers

HEADS = Path(__file__).parents[2] / "fixtures" / "heads"


def shortest(
    clock: Callable[[], float], path: Path, how: Verification | None, *options: Any
) -> list[tuple[float, int]]:
    """Return the shortest of three times of a conversion with each of the options, and the layers of its net."""
    found = [(math.inf, 0)] * len(options)
    for _ in range(3):
        for number, each in enumerate(options):
            start = clock()
            graph = convert(path, verification=how, **each).graph
            found[number] = min(found[number][0], clock() - start), count_layers(graph)
    return found


def main() -> None:
    """Print a line for each model, and a sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="")
    parser.add_argument("--no-verify", action="store_true")
    options = parser.parse_args()
    others, count, sums = 0, 0, [0.0] * 4
    print("model\tlayers\tby hand\tCPU s\tby hand\tverified s\tby hand")
    for path in sorted(path for path in HEADS.glob("*.onnx") if options.k in path.name):
        cut = convert(path, verification=None).cut
        if not cut:
            continue
        both: tuple[dict[str, Any], ...] = {}, {"outputs": cut, "tail": "never"}
        found = shortest(time.process_time, path, None, *both)
        if not options.no_verify:
            found += shortest(time.perf_counter, path, Verification(), *both)
        others, count = others + (found[0][1] != found[1][1]), count + 1
        sums = [a + b[0] for a, b in zip(sums, found, strict=False)]
        print(
            path.stem, *(layers for _, layers in found[:2]), *(f"{each:.2f}" for each, _ in found), sep="\t", flush=True
        )
    print(f"{count} models, {others} with other layers", "", "", *(f"{seconds:.1f}" for seconds in sums), sep="\t")


if __name__ == "__main__":
    main()
