"""Run a dozen nets on emulated aarch64, AVX2 and SSE CPUs and on Vulkan, in fp32 and fp16, as `.ci/run` does.

    python -m scripts.measure.check_devices

Ends with exit code 1 where a net is not right. A device that is missing (qemu, or a Vulkan driver)
is named, and is not a failure; docs/devices.md says how to get one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from onnx2ncnn_opt.errors import UsageError
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from onnx2ncnn_opt.runtime.targets import find_target
from scripts.measure.devices import MODELS, RIGHT, Cases, models, outcome

TARGETS = {
    "aarch64": "qemu-aarch64",
    "AVX2": "qemu-x86_64:Haswell",
    "SSE": "qemu-x86_64:Nehalem",
    "Vulkan": "vulkan",
}
NETS = (
    *("attention.dyn", "attention.ts", "dense.tsbn", "inverted.ts", "loops.ts", "residual.tsbn"),
    *("residual-batch.ts", "shuffle.dyn", "siamese.dyn", "siamese.tsbn", "temporal.tsbn", "video.ts"),
)


def cases() -> Cases:
    """The nets, each once."""
    return ((name, write) for name, write in models(MODELS) if name in NETS)


def main() -> int:
    """Run them wherever that is possible."""
    workers: dict[str, NcnnWorker] = {}
    for device, on in TARGETS.items():
        try:
            worker = NcnnWorker(find_target(on))
            worker.start()
        except UsageError as error:
            print(f"NOT CHECKED on {device}: {error}", flush=True)
        else:
            workers[device] = worker
    wrong = 0
    for name, write in cases() if workers else ():
        with tempfile.TemporaryDirectory(prefix="onnx2ncnn-opt-") as folder:
            net = write(Path(folder))
            if net is None:
                raise SystemExit(f"{name} is refused")
            for device, worker in workers.items():
                for mode in worker.target.modes:
                    kind, _, said = outcome(net, mode, worker)
                    if kind not in RIGHT:
                        wrong += 1
                        print(f"{name} on {device} in {mode}: {kind}: {said}", flush=True)
    for worker in workers.values():
        print(f"checked: {len(NETS)} nets, {worker.checked(worker.target.modes)}", flush=True)
        worker.close()
    print("devices:", ", ".join(f"{device} {'yes' if device in workers else 'NO'}" for device in TARGETS), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
