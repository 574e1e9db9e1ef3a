"""Plant faults in right nets, and count which of them verification catches.

    python -m scripts.fuzz.faults [FOLDER ...] [--each 2] [--seed 0] [-k REGEX] [--kinds REGEX] [--most N] [--write]
    python -m scripts.fuzz.faults [FOLDER ...] --bisect [--pnnx PATH/TO/pnnx] [--on qemu-aarch64] ...

The nets are converted from fixtures/models, from cases of fixtures/ops, and from the models in MODELS, or from the
.onnx files of folders; with `--pnnx` by pnnx. Each fault of FAULTS is planted at up to `--each` places of each net, one
at a time, and the net is verified as `verify` does. A fault that it misses is run against the right net on many other
inputs:

    without effect   no output differs by more than 1e-6 of its largest number
    small            none differs by 1 % or more
    SERIOUS          one does, or is NaN or infinite where it should not be

Of a difference only the part counts that rounding errors of the model at these inputs do not explain (see
`verify.rounding`): with random weights, some inputs take a deep network to where its last bits decide everything.

With `--bisect` each net is bisected in place of verified, and the layer that is named compared with the faulty one:

    named            the layers that `bisect` blames are the faulty one, or those planted there; of a deleted layer,
                     its consumers
    one of several   it is among the layers that are to blame
    NOT NAMED        it is not, or none is

Then faults of files are planted as well (BROKEN): a deleted output, an input of another name, a missing Split; and with
`--on`, those that only a device or fp16 shows (DEVICE_FAULTS).

`--keep FOLDER` keeps the nets and their models, with an ncnn-check.toml: `onnx2ncnn-opt check` has to fail all of them
but those that are called right_...

`--results FILE` adds each fault to a file of JSON lines, and the table is that of all in it: so several runs, of our
nets and pnnx's, make one table. `--write` keeps it in fixtures/measured/planted_faults.tsv, or located_faults.tsv with
`--bisect`. Exit code 1 says that a serious fault was missed, or not named.
"""

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from scripts.measure.measured import table
from testing.faults import NAMED, OUTCOMES, Campaign, Planted, models

TABLES = {False: "planted_faults", True: "located_faults"}


def publish(planted: Sequence[Planted], name: str, *, write: bool) -> None:
    """Print the table by class, with columns of names if anything was bisected."""
    columns = {**OUTCOMES, **({name: name.lower() for name in NAMED} if any(fault.named for fault in planted) else {})}
    counts = Counter((fault.kind, text) for fault in planted for text in (fault.outcome, fault.named))
    kinds = sorted({fault.kind for fault in planted})

    with table(name, ("fault", "planted", *columns.values()), write=write) as add:
        for label, of in (*((kind, [kind]) for kind in kinds), ("all", kinds)):
            found = [sum(counts[kind, column] for kind in of) for column in columns]
            add(label, sum(found[: len(OUTCOMES)]), *found)


def main() -> int:
    """Plant faults and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--each", type=int, default=1, help="places for each class in each net")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-k", default="", help="a regular expression for names of nets")
    parser.add_argument("--kinds", default="", help="a regular expression for classes of faults")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="faults in each net, of classes drawn at random")
    parser.add_argument("--bisect", action="store_true", help="the faulty layer has to be named")
    parser.add_argument("--on", help="where faults of devices are looked for")
    parser.add_argument("--pnnx", type=Path, help="the program pnnx, which is to convert the models")
    parser.add_argument("--results", type=Path, metavar="FILE", help="add the results to this file, and read all of it")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the nets there, with an ncnn-check.toml")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    start, planted = time.perf_counter(), []
    files = ((path.stem, path) for folder in options.folders for path in sorted(folder.glob("*.onnx")))
    chosen = ((name, model) for name, model in (files if options.folders else models()) if re.search(options.k, name))
    pnnx = options.pnnx.resolve() if options.pnnx else None
    with NcnnWorker() as worker:
        campaign = Campaign(
            worker,
            options.each,
            options.seed,
            options.most,
            options.bisect,
            options.on,
            pnnx,
            options.kinds,
            options.keep,
        )
        for fault in campaign.run(chosen):
            planted.append(fault)
            if options.results:
                with options.results.open("a") as file:
                    file.write(json.dumps(asdict(fault)) + "\n")
            if fault.outcome not in ("caught", "without effect") or fault.named == "NOT NAMED":
                where = f"{fault.net} ({fault.layers} layers) at {fault.layer}"
                print(f"{fault.outcome} {fault.named}: {fault.kind} in {where}: {fault.detail}", flush=True)
    if options.results:
        planted = [Planted(**json.loads(line)) for line in options.results.read_text().splitlines()]
    publish(planted, TABLES[options.bisect], write=options.write)
    for converter in sorted({fault.converter for fault in planted}):
        nets = {fault.net: fault.layers for fault in planted if fault.converter == converter}
        faults = sum(fault.converter == converter for fault in planted)
        print(f"{faults} in {len(nets)} nets of {min(nets.values())} to {max(nets.values())} layers, {converter}")
    print(f"{time.perf_counter() - start:.0f} s")
    return int(any(fault.outcome == "SERIOUS" or fault.named == "NOT NAMED" for fault in planted))


if __name__ == "__main__":
    sys.exit(main())
