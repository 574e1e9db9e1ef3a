"""Export one architecture of fixtures/architectures.toml with torch; `architectures export` starts it for each.

    python -m scripts.measure.architecture_export NAME FOLDER VARIANT...

A VARIANT is ts, ts-dynamic, dynamo or dynamo-dynamic. FOLDER gets NAME.VARIANT.onnx, and an .npz with inputs of the
first size, as speed.py, pnnx.py and devices.py read them. Standard output gets the outcome of each variant.
"""

import importlib
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scripts.measure.architectures import Architecture, read_architectures

_CALIBRATIONS = 4


class Called(nn.Module):
    """A model's method with inputs by name, and its first output or those of the given names."""

    def __init__(self, model: nn.Module, architecture: Architecture) -> None:
        super().__init__()
        self.model, self.method = model, architecture.method
        self.names, self.outputs = [entry.name for entry in architecture.inputs], architecture.outputs

    def forward(self, *inputs: Tensor) -> Any:
        """Return a tensor, or a tuple of the named outputs."""
        result = getattr(self.model, self.method)(**dict(zip(self.names, inputs, strict=True)))
        if self.outputs:
            return tuple(result[int(name) if name.isdecimal() else name] for name in self.outputs)
        while not isinstance(result, Tensor):
            result = next(iter(result.values())) if isinstance(result, dict) else result[0]
        return result


def build(architecture: Architecture) -> nn.Module:
    """Return the model with its package's initial weights, in which no weight is 0 or 1 by default."""
    torch.manual_seed(architecture.seed)
    model = made(architecture.make, architecture.options)
    for part in filter(None, architecture.part.split(".")):
        model = getattr(model, part)
    spread(model.eval())
    model = Called(model, architecture).eval()
    calibrate(model, architecture)
    return model


def made(make: str, options: Mapping[str, Any]) -> Any:
    """Return an object of a class of a package."""
    module, _, name = make.partition(":")
    package = importlib.import_module(module)
    given = {key: _option(value) for key, value in options.items() if key != "make"}
    if module == "timm":
        return package.create_model(name, **given)
    kind = getattr(package, name)
    config = getattr(kind, "config_class", None)
    return kind(config(**given)) if config else kind(**given)


def _option(value: Any) -> Any:
    if isinstance(value, dict) and "make" in value:
        return made(value["make"], value)
    return None if value == "" else value


def spread(model: nn.Module) -> None:
    """Spread weights that all have one value; scale small matrices up to torch's own initial weights.

    Packages start large models with small matrices (0.02), which leave every branch of a narrow model without effect.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and (parameter == parameter.reshape(-1)[0]).all():
                parameter.add_(torch.randn_like(parameter) / 10)
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and module.weight.numel():
                least = (3 * module.weight[0].numel()) ** -0.5
                module.weight.data.mul_(max(1.0, least / float(module.weight.std())))


def calibrate(model: nn.Module, architecture: Architecture) -> None:
    """Give batch normalisation the statistics of random inputs."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if norms:
        for norm in norms:
            norm.momentum = 1.0
            norm.train()
        batches = zip(*(draw(architecture) for _ in range(_CALIBRATIONS)), strict=True)
        with torch.no_grad():
            model(*map(torch.cat, batches))
        model.eval()


def draw(architecture: Architecture) -> tuple[Tensor, ...]:
    """Return random inputs of the first size."""
    sizes = architecture.sizes[0] if architecture.sizes else {}
    tensors = []
    for entry in architecture.inputs:
        shape = entry.shape(sizes)
        tensors.append(torch.randint(0, entry.below, shape) if entry.below else torch.randn(shape))
    return tuple(tensors)


def export(architecture: Architecture, exporter: str, path: Path, *, dynamic: bool) -> None:
    """Write the model as one of torch's exporters does; symbols are the names of dynamic axes."""
    model, inputs = build(architecture), draw(architecture)
    names = [entry.name for entry in architecture.inputs]
    axes = [entry.dynamic if dynamic else {} for entry in architecture.inputs]
    if exporter == "ts":
        named = {name: {axis: symbol for axis, (_, symbol) in of.items()} for name, of in zip(names, axes, strict=True)}
        options: dict[str, Any] = {"dynamo": False, "opset_version": 17, "dynamic_axes": named}
    else:
        dims = {symbol: torch.export.Dim(symbol) for of in axes for _, symbol in of.values()}
        shapes = [{axis: times * dims[s] if times > 1 else dims[s] for axis, (times, s) in of.items()} for of in axes]
        options = {"dynamo": True, "external_data": False, "dynamic_shapes": (tuple(shapes),) if dynamic else None}
    outputs = [f"out_{name}" if name.isdecimal() else name for name in architecture.outputs] or None
    torch.onnx.export(model, inputs, str(path), input_names=names, output_names=outputs, verbose=False, **options)
    np.savez(path.with_suffix(".npz"), **{f"in_{i}": tensor.numpy() for i, tensor in enumerate(inputs)})


def main(name: str, folder: Path, variants: Sequence[str]) -> None:
    """Export the variants; whatever an exporter raises is its outcome."""
    warnings.simplefilter("ignore")
    architecture = read_architectures()[name]
    for variant in variants:
        exporter, _, dynamic = variant.partition("-")
        path, start, outcome = folder / f"{name}.{variant}.onnx", time.perf_counter(), "exported"
        try:
            export(architecture, exporter, path, dynamic=bool(dynamic))
        except Exception as error:  # a model and an exporter may raise anything
            path.unlink(missing_ok=True)
            outcome = f"{type(error).__name__}: {error}"
        print(name, variant, f"{time.perf_counter() - start:.0f}", repr(outcome), sep="\t", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
