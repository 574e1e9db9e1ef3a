"""The main job for existing nets: optimise a .param and .bin of any converter, and verify the result."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path

from onnx2ncnn_opt.api.apply_passes import Optimized, apply_passes
from onnx2ncnn_opt.errors import RunError, VerificationError
from onnx2ncnn_opt.ir.features import MasksFor
from onnx2ncnn_opt.ir.releases import NEWEST
from onnx2ncnn_opt.ir.spec import LayerSpec
from onnx2ncnn_opt.param.files import NetFiles, PathLike, bin_beside
from onnx2ncnn_opt.progress import announce
from onnx2ncnn_opt.verification.options import Verification


def optimize(  # noqa: PLR0913
    param: PathLike,
    bin: PathLike | None = None,
    prefix: PathLike | None = None,
    *,
    binary: bool | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    fixed_shapes: bool = False,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    limit: int | None = None,
    start: Sequence[str] = (),
    end: Sequence[str] = (),
    storage: str | None = None,
    shape_hints: bool = False,
    custom: Collection[str | LayerSpec] = (),
    release: int = NEWEST,
    masks: MasksFor = True,
    verification: Verification | None = Verification(),
    benchmark: bool = False,
) -> Optimized:
    """Optimise a net, and verify that it computes the same.

    1. Read the net and run the passes (`apply_passes` explains the options). 2. Estimate fp16, and set the masks that
    the net needs. 3. Write PREFIX.param (PREFIX.param.bin for `binary`) and PREFIX.bin, if there is a `prefix`, and run
    the net before and after the passes. If they differ, the files are removed: `report` of the result says why, and
    `save` raises. 4. With `benchmark`, time both. Without a `verification`, nothing runs. `bin` is NET.bin by default.

    Raises:
        ParamError, BinError: the files are broken, or have weights of undeclared custom layers.
        UsageError: a name, shape or option is invalid.
        RunError, VerificationError: ncnn cannot run the original net.
    """
    result = apply_passes(
        param,
        bin_beside(Path(param)) if bin is None else bin,
        shapes=shapes,
        fixed_shapes=fixed_shapes,
        only=only,
        skip=skip,
        limit=limit,
        start=start,
        end=end,
        storage=storage,
        shape_hints=shape_hints,
        custom=custom,
        release=release,
        masks=masks,
    )
    if verification is not None and not result.misfit:
        announce("estimating what fp16 does to the net")
        with suppress(RunError):  # verification reports the reason
            result = result.estimated(verification, masks=masks)
    return _verified(result, prefix, binary, verification, benchmark)


def _verified(
    result: Optimized, prefix: PathLike | None, binary: bool | None, verification: Verification | None, benchmark: bool
) -> Optimized:
    """Write the files and verify the net; remove the files if it is wrong."""
    as_binary = result.is_binary if binary is None else binary
    files = NetFiles.at(result.source.param.stem if prefix is None else prefix, binary=as_binary)
    staging = result.staged_in_temporary_folder() if prefix is None else result.staged(prefix, binary=as_binary)
    before = result.source.bin.stat().st_size - result.trailing_bytes
    try:
        with staging as (staged, names):
            renamed = {blob.name: name for blob, name in names.items() if blob.name != name}
            result = replace(result, renamed=renamed, sizes=(before, staged.bin.stat().st_size))
            if verification is None:
                return result
            announce("running the net before and after")
            report = result.verify(verification, files=staged, names=names)
            result = replace(result, report=report.renamed(astuple(staged), astuple(files)))
            report.check()
            if benchmark:
                announce("timing the net before and after")
                result = replace(result, latency=result.benchmark(staged, names, verification=verification))
    except VerificationError:
        if result.report is None:  # nothing was compared
            raise
    return result
