"""Random nets optimised, run and compared with the original."""

from collections.abc import Mapping
from pathlib import Path
from random import Random

import numpy as np

from onnx2ncnn_opt.api.optimize import Optimized
from onnx2ncnn_opt.errors import CrashError, RunError
from onnx2ncnn_opt.inputs.net_draws import draw_runs
from onnx2ncnn_opt.ir.graph import Blob
from onnx2ncnn_opt.param.files import NetFiles, read_net, write_net
from onnx2ncnn_opt.precision.fp16_run import Estimator
from onnx2ncnn_opt.precision.half_sums import Inner
from onnx2ncnn_opt.runtime.base import Feed
from onnx2ncnn_opt.runtime.ncnn import NcnnRunner, NcnnWorker
from onnx2ncnn_opt.verdict.errors import DEFAULT, compare
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.pair import compare_outputs, run_reference
from testing.optimized import apply_passes
from testing.random_layers import RandomNet
from testing.runnable_nets import SHAPE, Net

NOISE = 3e-7  # of the largest number of a blob, as a root mean square


def make_net(rng: Random, kind: int, folder: Path) -> tuple[NetFiles, dict[str, tuple[int, ...]]]:
    """Return a random net on disk, and the shapes of those inputs that state none."""
    seed = rng.getrandbits(32)
    files = NetFiles.at(folder / "in", binary=kind < 2 and rng.random() < 0.2)
    if kind == 2:
        net = Net(Random(seed))
        # The logarithm of negative numbers is NaN, of which a Clip and a clipping convolution make different bounds.
        files.param.write_bytes(net.text.replace(b"0=17 31=1", b"0=9 31=1"))
        files.bin.write_bytes(net.weights)
        return files, dict.fromkeys(net.inputs, SHAPE)
    write_net(RandomNet(seed, cnn=kind == 1).graph, files.param, files.bin, binary=files.param.name.endswith(".bin"))
    return files, {}


def trial(number: int, seed: int, folder: Path, worker: NcnnWorker) -> str:
    """Optimise and compare one net; return the outcome."""
    rng = Random(f"{seed} {number}")
    kind = (0, 0, 1, 2)[number % 4]
    source, shapes = make_net(rng, kind, folder)
    options = {
        "shapes": shapes,
        "fixed_shapes": rng.random() < 0.5,
        "storage": rng.choice((None, None, None, None, "fp16", "bf16")),
        "shape_hints": rng.random() < 0.1,
    }
    result = apply_passes(source.param, source.bin, **options)
    if not any(not blob.is_input for blob in result.graph.outputs):
        return "no output"
    try:
        with result.staged(folder / "out") as staged:
            report = result.verify(Verification(timeout=20), files=staged, worker=worker)
            is_short = result.storage is not None and result.storage.count
            packed = "" if is_short else packing(result, staged, result.names, worker)
    except CrashError:
        return "original crashes"
    except RunError:
        return "original refused"
    # What 16 bits do to a difference of equal numbers is not a fault of a rewrite.
    outputs = report.folded or report.outputs
    is_same = all(output.status == "ok" for output in outputs)
    if not is_same and not is_ill_conditioned(result, worker, max(o.max_rel or 0.0 for o in outputs)):
        wrong = [f"{o.name} {o.status} {o.message}" for o in outputs if o.status != "ok"]
        passes = ", ".join(dict.fromkeys(event.pass_name for event in result.applied))
        return f"MISMATCH after {passes}: {'; '.join(wrong)}"
    if packed:
        return packed
    out = NetFiles.at(folder / "out", binary=result.is_binary)
    again = apply_passes(out.param, out.bin, **{**options, "storage": None})
    if options["storage"] and {event.pass_name for event in again.applied} == {"merge_equal_layers"}:
        return "same, with constants that are equal in 16 bits"
    if again.applied:
        return f"SECOND RUN: {again.applied[0]}"
    return "ill-conditioned" if not is_same else "same" if report.ok else "same, but not in 16 bits"


def packing(result: Optimized, files: NetFiles, names: Mapping[Blob, str], worker: NcnnWorker) -> str:
    """Return the error of a net when ncnn packs, and uses winograd and other fast kernels; empty if there is none."""
    wanted = {blob.name: names[blob] for blob in result.graph.outputs if not blob.is_input}
    paths = (result.source, result.source, files)
    plain, before, after = (
        NcnnRunner(path.param, path.bin, exact=not number, worker=worker, timeout=20)
        for number, path in enumerate(paths)
    )
    for draw, drawn in draw_runs(result.graph, result.shapes):
        feeds = {blob.name: array for blob, array in drawn.items()}
        try:
            reference = run_reference(before, feeds, list(wanted), one_by_one=False)
            unpacked = run_reference(plain, feeds, list(wanted), one_by_one=False)
        except RunError:  # which is the original's fault
            return ""
        renamed = {names[blob]: array for blob, array in drawn.items()}
        reports, _ = compare_outputs(after, renamed, reference, wanted, DEFAULT)
        wrong = [report for report in reports if report.status not in ("ok", "unproven")]
        if not wrong:
            continue
        if not all(compare(reference[o.name], unpacked[o.name]).ok for o in wrong):
            return "original differs with packing"
        if is_ill_conditioned(result, worker, max(o.max_rel or 0.0 for o in wrong)):
            return "ill-conditioned"
        passes = ", ".join(dict.fromkeys(event.pass_name for event in result.applied))
        return f"PACKING at {draw} after {passes}: {'; '.join(f'{o.name} {o.status} {o.message}' for o in wrong)}"
    return ""


def is_ill_conditioned(result: Optimized, worker: NcnnWorker, found: float) -> bool:
    """Return True if errors in the last bits of the original's blobs change its outputs by a tenth of `found`."""
    graph = read_net(result.source.param, result.source.bin).graph
    for _, drawn in draw_runs(graph, result.shapes):
        feeds = {blob: Feed(array) for blob, array in drawn.items()}
        with Estimator(graph, feeds, 20, worker) as estimator:
            exact = estimator.run()
            sizes = {layer: max(exact.largest.get(blob, 0.0) for blob in layer.outputs) for layer in graph}
            moved = estimator.run(noise={layer: Inner("", (NOISE * size,)) for layer, size in sizes.items()})
        for blob, before in exact.outputs.items():
            largest = max(float(np.nanmax(np.abs(before))), 1e-30)
            if not np.abs(before - moved.outputs[blob]).max() / largest <= found / 10:
                return True
    return False
