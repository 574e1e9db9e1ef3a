"""Records for pages, of any size, that no run is needed for."""

from onnx2ncnn_opt.manifest import Int8, Int8Layer
from onnx2ncnn_opt.outputs import OutputReport
from onnx2ncnn_opt.report.record import (
    Comparison,
    LayerError,
    LayerRow,
    MemoryCourse,
    NearMissRow,
    NetRecord,
)
from onnx2ncnn_opt.rewrite.lineage import Group

# What a name in a model may do to a page that is careless.
HOSTILE = (
    "</script><script>document.title='broken'</script><img src=x onerror=document.title='broken'>&lt;@@data@@\u2028'\""
)


def record(layers: int, *, name: str = "") -> NetRecord:
    """Return the record of a net of so many layers after, each of two before; every tenth has a distant reader, too."""
    errors = {"fp32": LayerError("right", 1e-6, "", "value"), "fp16": LayerError("wrong", float("inf"), "off", "value")}
    before = tuple(
        LayerRow("ReLU" if n % 2 else "Convolution", f"{name}layer{n}", "", (n - 1,) if n else (), (f"b{n} [8]",))
        for n in range(2 * layers)
    )
    after = tuple(
        LayerRow(
            type="Convolution",
            name=f"{name}layer{2 * n}",
            params=f"{name} num_output=8",
            reads=() if not n else (n - 1, n - 7) if n % 10 == 8 else (n - 1,),
            blobs=(f"{name} [8, 4, 4]",),
            origin=(f"{name}/node{2 * n}", f"/node{2 * n + 1}"),
            macs=1000 * (n % 50),
            weights=64,
            weight_bytes=256,
            blob_bytes=1024,
            seconds=1e-5 * (n % 7),
            mask=name,
            errors=errors,
        )
        for n in range(layers)
    )
    rows = (
        Int8Layer(f"{name}layer0", "Convolution", "one scale", 8, 3.0, 0.001, 1e-4, (2e-5, 1e-5)),
        Int8Layer(f"{name}layer2", "Gemm", "", 0, None, None, 1e-2, (2e-5, 3e-5), f"{name} is no faster"),
        Int8Layer(f"{name}layer4", "MatMul", reason=f"{name} has no form"),
    )
    return NetRecord(
        int8=Int8(rows, 39.5, 0.99, 16, (4e-5, 3e-5), f"on {name}"),
        title=name or "a net",
        verdict="wrong",
        headline=f"1 of 2 outputs differs {name}",
        facts=(("input", f"{name} [1, 3, 4, 4]"),),
        notes=(name,),
        outputs=(
            OutputReport(f"{name}y", "y", "ok", "", 1e-6, 1e-6, 1.0, allowed=2e-7, rule="rounding"),
            OutputReport(f"{name}y", "y", "nan", name, max_rel=float("nan"), mode="fp16"),
        ),
        modes=("fp32", "fp16"),
        before=before,
        after=after,
        rows=tuple(row for n in range(layers) for row in ((2 * n, None), (2 * n + 1, n))),
        groups=tuple(Group((2 * n, 2 * n + 1), (n,), (f"{name}fuse",)) for n in range(layers)),
        rewrites=((f"{name}fuse", layers),),
        near_misses=tuple(NearMissRow(f"{name}fuse", name, f"{name} reason", (n,)) for n in range(0, layers, 5)),
        memory=(
            MemoryCourse(tuple(range(2 * layers)), tuple(1000 + n % 37 for n in range(2 * layers))),
            MemoryCourse(tuple(range(layers)), tuple(1000 + n % 31 for n in range(layers))),
        ),
        comparison=Comparison(name, tuple((f"{name}layer{n}", "layer", "there", "gone", "") for n in range(layers))),
        timing="measured",
        errors="compared",
    )
