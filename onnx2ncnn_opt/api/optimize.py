"""The main job for existing nets: optimise a .param and .bin of any converter, and verify the result."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from onnx2ncnn_opt import entry_points
from onnx2ncnn_opt.api.finish import finish
from onnx2ncnn_opt.api.net_shapes import add_hints, infer_shapes
from onnx2ncnn_opt.api.optimized import Optimized, with_passes, with_shapes
from onnx2ncnn_opt.api.options import ConvertOptions
from onnx2ncnn_opt.errors import check_option, check_options
from onnx2ncnn_opt.ir.features import MasksFor
from onnx2ncnn_opt.ir.memory import peak_memory
from onnx2ncnn_opt.ir.releases import NEWEST, check_release
from onnx2ncnn_opt.ir.spec import LayerSpec
from onnx2ncnn_opt.param.files import NetFiles, PathLike, bin_beside, read_net
from onnx2ncnn_opt.param.splits import count_layers
from onnx2ncnn_opt.param.storage import encoding_of
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
    """Optimise a net, text or binary, and verify that it computes the same.

    1. Read the net and run the passes. 2. Estimate fp16, and set the masks that the net needs. 3. Write PREFIX.param
    (PREFIX.param.bin for `binary`) and PREFIX.bin, if there is a `prefix`, and run the net before and after the passes.
    If they differ, the files are removed: `report` of the result says why, and `save` raises. 4. With `benchmark`, time
    both. Without a `verification`, nothing runs.

    `bin` is NET.bin by default. `shapes` are the sizes of inputs by blob name, outermost first; a leading 1 may be the
    batch. The default is the shapes in the Input layers, or those of pnnx in NAME_ncnn.py or NAME.pnnx.param next to
    NAME.ncnn.param. Passes may rely on all shapes only with `fixed_shapes`; without it the net also takes other shapes.
    `only` and `skip` choose passes, `limit` is the largest number of rewrites. `start` and `end` are blobs: the layers
    between them become the net. `storage` "fp16" or "bf16" stores weights in 16 bits if they lose little; without it,
    only weights computed from 16-bit weights get 16 bits. `shape_hints` writes the shapes into the layers (parameter
    30); on a GPU the net then takes no others. `custom` declares layers that ncnn lacks (`ir.custom.custom_layer`).
    `release` (YYYYMMDD) is the oldest ncnn that has to run the result. `masks` gives feature masks to layers that need
    more than fp16.

    Raises:
        ParamError, BinError: the files are broken, or have weights of undeclared custom layers.
        UsageError: a name, shape or option is invalid.
        RunError, VerificationError: ncnn cannot run the original net.
    """
    check_options(param=param, bin=bin, shapes=shapes, only=only, skip=skip, limit=limit, start=start, end=end)
    check_options(custom=custom)
    for name, shape in (shapes or {}).items():
        check_option("list", f"shapes['{name}']", shape)
        for size in shape:
            check_option("count", f"a size in shapes['{name}']", size)
    types = entry_points.layer_types(custom)
    chosen = entry_points.select(only, skip)
    check_release(release)
    encoding = encoding_of(storage, release)
    announce("reading the net")
    files = NetFiles(Path(param), bin_beside(Path(param)) if bin is None else Path(bin))
    net = with_shapes(read_net(files.param, files.bin, types), files, shapes or {}, start, end)
    net = with_passes(net, chosen, fixed_shapes=fixed_shapes, limit=limit, release=release)
    storage_plan, proved = finish(net.graph, encoding=encoding, keeps_storage=True, masks=masks)
    infer_shapes(net.graph, net.shapes)
    if shape_hints:
        add_hints(net.graph)
    layers, memory = (net.layers[0], count_layers(net.graph)), (net.memory[0], peak_memory(net.graph))
    result = replace(net, layers=layers, memory=memory, storage=storage_plan, masks=proved)
    result = result if binary is None else replace(result, is_binary=binary)
    return result.finished(ConvertOptions(prefix, verification=verification, masks=masks, benchmark=benchmark))
