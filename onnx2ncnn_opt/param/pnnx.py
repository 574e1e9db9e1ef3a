"""Facts about pnnx's nets, from the files next to them; they are read as text, never run."""

import re
from contextlib import suppress
from pathlib import Path

_MAX_BYTES = 2**20  # the inputs are at the beginning

# in0 = torch.rand(1, 3, 64, 64, dtype=torch.float)
# in1 = torch.randint(10, (1, 16), dtype=torch.long)
_TENSOR = re.compile(r"^\s*(\w+) = torch\.rand(?:int)?\((?:\d+, \()?([\d, ]+?),? *\)?, dtype", re.MULTILINE)
# ex.input("in0", ncnn.Mat(in0.numpy(), batch_index=0).clone()), or .squeeze(0).numpy() in older versions
_FED = re.compile(r'ex\.input\("(\w+)", ncnn\.Mat\(\w+(?:\.squeeze\((\d+)\))?\.numpy\(\)(?:, batch_index=(\d+))?\)')
# pnnx.Input  in0  0 1 0 #0=(1,3,64,64)f32
_INPUT = re.compile(r"^pnnx\.Input\s+(\w+)\s+0\s+1\s+\S+\s+#\S+=\(([\d,]+)\)", re.MULTILINE)


def shapes_beside(param: Path) -> tuple[Path | None, dict[str, tuple[int, ...]]]:
    """Return the file that has the shapes of a net's inputs, NAME_ncnn.py or NAME.pnnx.param, and the shapes by name.

    NAME_ncnn.py has ncnn's shapes. NAME.pnnx.param has the model's, because it does not say which axis is the batch.
    """
    if not param.name.endswith(".ncnn.param"):
        return None, {}
    name = param.name.removesuffix(".ncnn.param")
    program, graph = param.with_name(f"{name}_ncnn.py"), param.with_name(f"{name}.pnnx.param")
    text = _beginning(program)
    shapes = {match[1]: _sizes(match[2]) for match in _TENSOR.finditer(text)}
    ncnn_shapes: dict[str, tuple[int, ...]] = {}
    for match in _FED.finditer(text):
        axis = match[2] or match[3]
        if (shape := shapes.get(match[1])) is not None:
            ncnn_shapes[match[1]] = shape if axis is None else tuple(s for i, s in enumerate(shape) if i != int(axis))
    if ncnn_shapes:
        return program, ncnn_shapes
    model_shapes = {match[1]: _sizes(match[2]) for match in _INPUT.finditer(_beginning(graph))}
    return (graph, model_shapes) if model_shapes else (None, {})


def _beginning(path: Path) -> str:
    with suppress(OSError), path.open("rb") as file:
        return file.read(_MAX_BYTES).decode(errors="replace")
    return ""


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size.strip())
