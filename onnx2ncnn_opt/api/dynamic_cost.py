"""The layers that dynamic dimensions cost."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from onnx2ncnn_opt.api.lower import Conversion, lower
from onnx2ncnn_opt.errors import Error
from onnx2ncnn_opt.ir.dim import Dim, Sym, named, names_in
from onnx2ncnn_opt.onnx.walk import Port
from onnx2ncnn_opt.param.splits import count_layers
from onnx2ncnn_opt.report.words import number_of


def cost_of_dynamic(
    conversion: Conversion, *, layers: int | None = None, ran_at: Mapping[str, int] | None = None
) -> list[str]:
    """Return a line for the batch and one for the other dynamic dimensions: their cost, and the option to fix them.

    Dimensions without a cost get no line, nor does a batch that the net does not have. To count layers, the model is
    lowered with a batch of one, and then also with the other sizes that it `ran_at`. `layers` is the number without
    the casts that the estimate of fp16 has added, by default the graph's.
    """
    fixed: dict[str, Dim] = {}
    free = {p.free_batch for p in conversion.inputs}
    first = {str(p.shape[0]) for p in conversion.inputs if len(p.shape) > 1 and isinstance(p.shape[0], Sym)}
    batch = dict.fromkeys(sorted(first - free), 1)
    names = names_in(size for port in conversion.inputs for size in port.shape)
    names -= free
    others = {name: size for name, size in (ran_at or {}).items() if name in names - set(batch)}
    if not batch and not others:
        return []
    lines, layers = [], count_layers(conversion.graph) if layers is None else layers
    for sizes in filter(None, (batch, others)):
        fixed |= sizes
        shapes = {
            port.name: list(named(port.shape, fixed))
            for port in conversion.inputs
            if not names_in(port.shape).isdisjoint(fixed)
        }
        try:
            options = replace(conversion.options, shapes={**conversion.model.given, **shapes})
            other = lower(conversion.source, options)
            count = count_layers(other.graph)
        except Error:  # the model cannot be lowered at these sizes
            continue
        cost, layers = layers - count, count
        if cost > 0:
            verb, them = ("is", "it") if len(sizes) == 1 else ("are", "them")
            given = conversion.model.given
            ports = _binding(conversion, [port for port in conversion.inputs if port.name in shapes], fixed)
            arguments = " ".join(_shape_option(p, shapes[p.name], is_given=p.name in given) for p in ports)
            how = arguments if sizes is batch else f"your sizes, as in {arguments}"
            costs = number_of(cost, "layer")
            lines.append(f"{', '.join(sizes)} {verb} dynamic, which costs {costs}; fix {them} with {how}")
    return lines


def _binding(conversion: Conversion, ports: Sequence[Port], fixed: Collection[str]) -> list[Port]:
    """Return the ports whose sizes bind all that is `fixed`: a name binds in every input that has it.

    In the file, sizes that are only known to be equal have other names.
    """
    equal, found, bound = {name for names in conversion.equal for name in names}, list[Port](), set[str]()
    for port in ports:
        names = names_in(port.shape).intersection(fixed)
        if names - bound:
            found.append(port)
            bound |= names - equal
    return found


def _shape_option(port: Port, sizes: Sequence[Dim], *, is_given: bool) -> str:
    """Return the option that gives an input these sizes; unchanged sizes are ``?``, unless the shape `is_given`."""
    pairs = zip(sizes, port.shape, strict=True)
    texts = ("?" if size == before and not is_given else str(size).replace(" ", "") for size, before in pairs)
    return f"--shape {port.name}:{','.join(texts)}"
