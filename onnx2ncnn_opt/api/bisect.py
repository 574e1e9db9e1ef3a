"""Search for the fault of a wrong net: the first layer that exceeds the tolerance, or the rewrite that broke it."""

import os
from bisect import bisect_left
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnx2ncnn_opt import entry_points
from onnx2ncnn_opt.api.bisection.pair import Pair, write_smallest_part
from onnx2ncnn_opt.api.bisection.search import Located, find_first_wrong, find_missing, find_unsplit, locate
from onnx2ncnn_opt.api.bisection.wrong_net import WrongNet, convert_anew
from onnx2ncnn_opt.api.diff import NetDiff, diff_graphs
from onnx2ncnn_opt.api.lower import lower
from onnx2ncnn_opt.api.verify import manifest_for
from onnx2ncnn_opt.errors import VerificationError, check_options
from onnx2ncnn_opt.ir.correspondence import corresponding
from onnx2ncnn_opt.manifest import Manifest
from onnx2ncnn_opt.onnx.edit.append import converted_model
from onnx2ncnn_opt.onnx.read.exported import exported, reference
from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.param.files import PathLike, bin_beside, read_net
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.rewrite.events import Applied
from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
from onnx2ncnn_opt.runtime.targets import LOCAL, find_target
from onnx2ncnn_opt.system import temporary_folder
from onnx2ncnn_opt.verification.model import verify_net
from onnx2ncnn_opt.verification.model_runs import load_converted
from onnx2ncnn_opt.verification.options import Verification
from onnx2ncnn_opt.verification.report import VerifyReport


@dataclass(frozen=True)
class Bisection:
    """The result of `bisect`: `report` is the result of `verify`, `located` the first wrong layer.

    `located` is None if the net is right or ncnn cannot load it. `difference` has the differences from a new conversion
    with this version, for a net of this package. `pair` are the files in `write`, None without a wrong layer, or if no
    part of the net is wrong on its own.
    """

    report: VerifyReport
    located: Located | None
    difference: NetDiff | None
    pair: Pair | None = None


def bisect(
    model: Any,
    param: PathLike,
    bin: PathLike | None = None,
    verification: Verification = Verification(),
    *,
    manifest: Manifest | PathLike | None = None,
    write: Path | None = None,
) -> Bisection:
    """Verify a net with the arguments of `verify`; if it is wrong, find its first wrong layer.

    1. If the net has a manifest of this package, compare its layers with a new conversion with the same options, if
       the new conversion is right.
    2. Otherwise compare its blobs with values inside the model: with the value of the same name, or any value with the
       same numbers in another order of axes.

    A path of wrong blobs leads from the first wrong layer to a wrong output. `write` is a folder for the smallest part
    of the model and the net that is wrong on its own, see `bisection.pair`.
    """
    check_options(param=param, bin=bin)
    param, bin = Path(param), Path(bin or bin_beside(param))
    net_manifest, note = manifest_for(model, param, manifest)
    source = converted_model(model, net_manifest)
    target = find_target(verification.on)
    with NcnnWorker(target) as worker, nullcontext(worker) if target == LOCAL else NcnnWorker() as local:
        try:
            report = verify_net(source, param, bin, verification, manifest=net_manifest, worker=worker)
        except VerificationError as error:
            return _not_fed(str(error), net_manifest, param, bin)
        if note:
            report = replace(report, notes=(note, *report.notes))
        if report.ok:
            return Bisection(report, None, None)
        net = read_net(param, bin, entry_points.layer_types())
        with temporary_folder() as folder:
            announce("converting the model anew")
            fresh = convert_anew(source, net_manifest, Path(folder)) if net_manifest else None
            difference = None
            if fresh:
                # A run sets masks, not the passes, so they are not compared.
                for ours, theirs in corresponding(net.graph, fresh.graph).items():
                    theirs.params["featmask"] = ours["featmask"]
                difference = diff_graphs(fresh.graph, net.graph, names=("a new conversion", os.fspath(param)))
            if report.wrong is None:
                return Bisection(report, None, difference)
            loaded = load_converted(source, net_manifest, shapes=verification.shapes, values=verification.values)
            wrong = WrongNet(source, loaded, param, bin, net.graph, net_manifest, report, verification, worker, local)
            located = find_unsplit(wrong, net.unsplit)
            first = None if located else find_first_wrong(wrong, fresh)
            if located is None:
                located = first.located if first else find_missing(wrong, fresh)
            pair = write_smallest_part(wrong, first, write) if first and write else None
    return Bisection(report, _only_changed(located, difference), difference, pair)


def _only_changed(located: Located | None, difference: NetDiff | None) -> Located | None:
    """Keep only the suspects that differ from the new conversion, if there are any."""
    if located is None or difference is None:
        return located
    changed = {*difference.added, *(change.after for change in difference.changed)}
    suspects = tuple(ref for ref in located.suspects if ref in changed)
    return replace(located, suspects=suspects or located.suspects)


def _not_fed(message: str, manifest: Manifest | None, param: Path, bin: Path) -> Bisection:
    """Report a net with an input that the model does not have, and locate its Input layer."""
    graph = read_net(param, bin, entry_points.layer_types()).graph
    declared = {entry.blob for entry in manifest.inputs} if manifest else set()
    names = [entry.name for entry in manifest.outputs] if manifest else [blob.name for blob in graph.outputs]
    report = VerifyReport(tuple(OutputReport(name, None, "refused", message) for name in names), None)
    unknown = next((blob for blob in graph.inputs if blob.name not in declared and blob.producer), None)
    located = None if unknown is None else locate(unknown, "fp32", message)
    return Bisection(report, located, None)


@dataclass(frozen=True)
class PassBisection:
    """The result of `bisect_passes`.

    `rewrites` counts all rewrites. `number`, from 1, is the first rewrite that breaks the net: None if the net is
    right after all of them, 0 if it is wrong without any. `event` is this rewrite, and `report` the verification of the
    net after it, or after all rewrites if the net is right.
    """

    rewrites: int
    number: int | None
    event: Applied | None
    report: VerifyReport


def bisect_passes(
    model: Any, verification: Verification = Verification(), *, skip: Collection[str] = ()
) -> PassBisection:
    """Convert a model, with the shapes and values of `verification`, and find the rewrite that breaks the net.

    Raises the errors of `lower` and `verify_net`.
    """
    source = exported(model)
    if not isinstance(source, (str, os.PathLike)):
        source = reference(source)
    shapes, values = verification.shapes, verification.values
    unbound = replace(verification, shapes=None, values=None)
    failed: set[str] = set()

    def verified(limit: int | None) -> tuple[tuple[Applied, ...], VerifyReport]:
        conversion = lower(source, shapes=shapes, values=values, skip={*skip, *failed}, limit=limit)
        failed.update(event.pass_name for event in conversion.failed)
        return conversion.applied, conversion.verify(unbound)

    announce("verifying the net with all rewrites")
    applied, report = verified(None)
    if report.ok:
        return PassBisection(len(applied), None, None, report)
    announce("verifying the net without rewrites")
    before = verified(0)[1] if applied else report
    if not before.ok:
        return PassBisection(len(applied), 0, None, before)
    reports = {len(applied): report}

    def is_wrong(limit: int) -> bool:
        announce(f"verifying the net after {limit} of {len(applied)} rewrites")
        reports[limit] = verified(limit)[1]
        return not reports[limit].ok

    number = bisect_left(range(len(applied)), True, lo=1, key=is_wrong)
    return PassBisection(len(applied), number, applied[number - 1], reports[number])
