"""Quantise the nets of scripts.quantization.train by onnxruntime.quantization, and measure what we make of them.

    python -m scripts.quantization.imports FOLDER [-k PART] [--write]

FOLDER has the float nets and the data. Twelve forms of each net are written there: QDQ and QOperator, two calibrators,
signed and unsigned activations, a scale for each channel or one for all. Each row has the SQNR in dB to the float model
of ONNX Runtime in its exact mode and of our net, both top-1 agreements, the share of convolutions and Gemms in int8,
the size of the .bin in that of the float weights, and the result of verification.
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_static,
)

from onnx2ncnn_opt import Net
from onnx2ncnn_opt.api.convert import convert
from onnx2ncnn_opt.errors import Error
from onnx2ncnn_opt.ir.int8 import PRODUCTS
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.ort import OrtRunner
from onnx2ncnn_opt.verification.sqnr import Agreement
from scripts.measure.measured import table

COLUMNS = ("model", "ort dB", "our dB", "ort top-1", "our top-1", "int8", "bin", "verification")
FORMS = [
    ("qdq", "minmax", "signed", "channel"),
    ("qdq", "minmax", "signed", "tensor"),
    ("qdq", "minmax", "unsigned", "channel"),
    ("qdq", "minmax", "unsigned", "tensor"),
    ("qdq", "percentile", "signed", "channel"),
    ("qdq", "percentile", "unsigned", "channel"),
    ("qop", "minmax", "signed", "channel"),
    ("qop", "minmax", "signed", "tensor"),
    ("qop", "minmax", "unsigned", "channel"),
    ("qop", "minmax", "unsigned", "tensor"),
    ("qop", "percentile", "signed", "channel"),
    ("qop", "percentile", "unsigned", "tensor"),
]


class Reader(CalibrationDataReader):
    """Samples, one after the other."""

    def __init__(self, data: Array) -> None:
        self._feeds = iter({"x": sample[None]} for sample in data)

    def get_next(self) -> dict[str, Array] | None:
        """Return the next sample."""
        return next(self._feeds, None)


def quantised(model: Path, data: Array, form: tuple[str, str, str, str], path: Path) -> None:
    """Write a quantised form of a model."""
    kind, method, sign, scales = form
    methods = {"minmax": CalibrationMethod.MinMax, "percentile": CalibrationMethod.Percentile}
    quantize_static(
        model,
        path,
        Reader(data),
        quant_format=QuantFormat.QDQ if kind == "qdq" else QuantFormat.QOperator,
        activation_type=QuantType.QInt8 if sign == "signed" else QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        per_channel=scales == "channel",
        calibrate_method=methods[method],
        extra_options={"ActivationSymmetric": sign == "signed", "WeightSymmetric": True},
    )


def scores(run: Callable[[dict[str, Any]], Any], data: Array) -> Array:
    """Return the scores [samples, classes] of a net or model."""
    return np.concatenate([run({"x": x[None]})["scores"] for x in data])


def agreement(actual: Array, reference: Array) -> tuple[str, str]:
    """Return the SQNR in dB, and the share of samples with the same largest score."""
    found = Agreement()
    found.add({"scores": reference}, {"scores": actual})
    return f"{found.decibels:.1f}", f"{found.top1:.3f}"


def row(path: Path, floats: int, data: Array, reference: Array) -> list[str]:
    """Convert and verify a model, and return what it measures."""
    their_sqnr, their_top1 = agreement(scores(OrtRunner(path).run, data), reference)
    try:
        made = convert(path, path.with_suffix(""), keep_failed=True, quantized="keep")
    except Error as error:
        return [path.stem, their_sqnr, "", "", "", "", "", str(error)]
    with Net(path.with_suffix("")) as net:
        our_sqnr, our_top1 = agreement(scores(net.run, data), reference)
    layers = [layer for layer in made.graph if layer.type in PRODUCTS and "weight_data" in layer.weights]
    layers += [layer for layer in made.graph if layer.type == "Gemm" and layer["constantB"]]
    share = np.mean([any("scale" in name for name in layer.weights) for layer in layers])
    size = path.with_suffix(".ncnn.bin").stat().st_size / floats
    report = made.report
    verdict = "ok" if report and report.ok else "; ".join(map(str, report.outputs)) if report else "none"
    return [path.stem, their_sqnr, our_sqnr, their_top1, our_top1, f"{share:.0%}", f"{size:.2f}", verdict]


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-k", dest="part", default="")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    calibration, test = (np.load(arguments.folder / f"{name}.npz")["x"] for name in ("calibration", "test"))
    with table("quantized_models", COLUMNS, write=arguments.write) as add:
        for net, form in itertools.product(("resnet", "mobile", "vit"), FORMS):
            path = arguments.folder / f"{net}-{'-'.join(form)}.onnx"
            if arguments.part not in path.stem:
                continue
            model = arguments.folder / f"{net}.onnx"
            if not path.exists():
                quantised(model, calibration, form, path)
            floats = sum(4 * int(np.prod(tensor.dims)) for tensor in onnx.load(model).graph.initializer)
            add(*row(path, floats, test, scores(OrtRunner(model).run, test)))


if __name__ == "__main__":
    main()
