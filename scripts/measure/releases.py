"""Nets for older ncnn releases, run in those releases.

    python -m scripts.measure.releases [RELEASE...]      default: every release of PyPI that has a wheel for this Python

Converts each model of fixtures/models with ``release=RELEASE``, installs that release of ncnn into a folder of its own,
runs the net there in a child process, and compares with ONNX Runtime. Prints a line for each refused or wrong net, and
a summary for each release; ends with 1 if a net was wrong.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.errors import UnsupportedError
from onnx2ncnn_opt.inputs.draws import draw_inputs
from onnx2ncnn_opt.onnx.read.load import load_model
from onnx2ncnn_opt.runtime.ort import OrtRunner
from testing.exports import refilled

MODELS = sorted((Path(__file__).parents[2] / "fixtures" / "models").glob("*.onnx"))
RELEASES = ("20240102", "20240410", "20240820", "20241226", "20250503", "20250916", "20260526", "20261020")
TOLERANCE = 1e-3  # of the largest value; right nets are off by 1e-5

# Older bindings know no batch: an axis of size 1 is dropped here.
RUN = """
import json, sys
sys.path.insert(0, sys.argv[1])
import ncnn
import numpy as np
prefix = sys.argv[2]
manifest, arrays = json.load(open(prefix + ".ncnn.json")), np.load(prefix + ".npz")
net = ncnn.Net()
net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
assert net.load_param(prefix + ".ncnn.param") == 0 and net.load_model(prefix + ".ncnn.bin") == 0, "does not load"
extractor, kept = net.create_extractor(), []
for entry in manifest["inputs"]:
    x = arrays["in:" + entry["name"]]
    x = x if entry["batch_axis"] is None else x.squeeze(entry["batch_axis"])
    kept.append(np.ascontiguousarray(x, np.float32 if x.dtype.kind == "f" else np.int32))
    kept.append(ncnn.Mat(kept[-1]).clone())
    extractor.input(entry["blob"], kept[-1])
worst = 0.0
for entry in manifest["outputs"]:
    code, mat = extractor.extract(entry["blob"])
    result, reference = np.array(mat), arrays["out:" + entry["name"]]
    assert code == 0 and result.size == reference.size, "no result of the right size"
    error = np.abs(result.reshape(-1) - reference.reshape(-1)).max() / max(np.abs(reference).max(), 1e-30)
    worst = max(worst, float(error))
print(json.dumps(worst))
"""


def check(path: Path, release: str, package: Path, folder: Path) -> str:
    """Run one model in one release; return right, refused or wrong, with the reason."""
    model = refilled(path)
    data = model.SerializeToString()
    prefix = folder / path.stem
    try:
        lower(model, release=int(release)).save(prefix)
    except UnsupportedError as error:
        return f"refused: {error.nodes[0].reason}"
    loaded = load_model(data)
    feeds = draw_inputs(loaded, {str(d): 1 for i in loaded.inputs for d in i.shape[:1] if not isinstance(d, int)})
    results = OrtRunner(data).run(feeds)
    named: dict[str, Any] = {f"in:{name}": x for name, x in feeds.items()} | {
        f"out:{name}": x for name, x in results.items()
    }
    np.savez(prefix.with_name(prefix.name + ".npz"), **named)
    command = [sys.executable, "-c", RUN, str(package), str(prefix)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if process.returncode:
        return f"wrong: {(process.stderr.strip().splitlines() or [f'ended with {process.returncode}'])[-1]}"
    worst = json.loads(process.stdout.splitlines()[-1])
    return "right" if worst <= TOLERANCE else f"wrong: off by {worst:.1e} of the largest value"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", default=RELEASES)
    wrong = 0
    for release in parser.parse_args().releases:
        with tempfile.TemporaryDirectory() as temporary:
            package, folder = Path(temporary) / "package", Path(temporary) / "nets"
            folder.mkdir()
            install = ["-m", "pip", "install", "-q", "--no-deps", "--target", str(package), f"ncnn==1.0.{release}"]
            if subprocess.run([sys.executable, *install], capture_output=True).returncode:
                print(f"{release}: no wheel for this Python")
                continue
            outcomes: Counter[str] = Counter()
            for path in MODELS:
                outcome = check(path, release, package, folder)
                outcomes[outcome.partition(":")[0]] += 1
                if outcome != "right":
                    print(f"{release} {path.stem}: {outcome}", flush=True)
            print(f"{release}: " + ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items())), flush=True)
            wrong += outcomes["wrong"]
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
