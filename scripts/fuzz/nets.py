"""Random nets through `optimize`: every output stays in the real runtime, and a second run finds nothing to do.

    python -m scripts.fuzz.nets [--count 10000] [--seed 0] [--first 0]

A net is of one of three kinds: layers of the whole table (testing/random_layers.py, guards and rows of every
length among them), the layers of its CNN, which passes know best, or text with everything that the
format allows (testing/runnable_nets.py). It is optimised with some of the options, verified as the command does it
(with ncnn's plain kernels), run with packing and all other kernels as well, and optimised again. Where outputs differ,
the original is run with errors in the last bits of every blob: a net that magnifies those as much is ill-conditioned,
and only counted, as are those whose original gives something else with packing than without.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from onnx2ncnn_opt.errors import Error
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from testing.fuzz_nets import trial


def main() -> int:
    """Print the errors, then the count of each outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first net, as after a stop")
    options = parser.parse_args()
    ends: Counter[str] = Counter()
    start = time.perf_counter()
    with NcnnWorker() as worker, tempfile.TemporaryDirectory() as folder:
        for number in range(options.first, options.first + options.count):
            try:
                end = trial(number, options.seed, Path(folder), worker)
            except Error as error:
                end = f"ERROR {type(error).__name__}: {error}"
            if end.split()[0].rstrip(":").isupper():
                print(f"{number}: {end}", flush=True)
            ends[end.split()[0].rstrip(":") if end[0].isupper() else end] += 1
            if ends.total() % 100 == 0:
                print(f"up to {number}: {dict(ends.most_common())}", file=sys.stderr, flush=True)
    print(f"{options.count} nets in {time.perf_counter() - start:.0f} s: {dict(ends.most_common())}")
    return int(any(end.isupper() for end in ends))


if __name__ == "__main__":
    sys.exit(main())
