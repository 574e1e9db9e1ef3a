"""Random nets through `optimize`: every output stays in the real runtime, and a second run finds nothing to do.

    python -m scripts.fuzz.nets [--count 10000] [--seed 0] [--first 0]

A net is of one of three kinds: layers of the whole table (testing/random_layers.py, guards and rows of every
length among them), the layers of its CNN, which passes know best, or text with everything that the
format allows (testing/runnable_nets.py). It is optimised with some of the options, verified as the command does it
(with ncnn's plain kernels), run with packing and all other kernels as well, and optimised again. Where outputs differ,
the original is run with errors in the last bits of every blob: a net that magnifies those as much is ill-conditioned,
and only counted, as are those whose original gives something else with packing than without.
"""

import sys
import tempfile
from pathlib import Path

from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from scripts.fuzz import campaign
from testing.fuzz_nets import trial


def main() -> int:
    """Print the errors, then the count of each outcome."""
    given = campaign.arguments(__doc__, 10_000).parse_args()
    with NcnnWorker() as worker, tempfile.TemporaryDirectory() as folder:
        return campaign.report(campaign.judged(given, lambda n: trial(n, given.seed, Path(folder), worker)))


if __name__ == "__main__":
    sys.exit(main())
