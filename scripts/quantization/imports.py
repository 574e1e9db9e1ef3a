"""Quantise the nets of scripts.quantization.train by onnxruntime.quantization, and measure what we make of them.

    python -m scripts.quantization.imports FOLDER [-k PART] [--write]

FOLDER has the float nets and the data. Twelve forms of each net are written there: QDQ and QOperator, two calibrators,
signed and unsigned activations, a scale for each channel or one for all. Each row has the SQNR in dB to the float model
of ONNX Runtime in its exact mode and of our net, both top-1 agreements, the share of convolutions and Gemms in int8,
the size of the .bin in that of the float weights, and the result of verification.
"""

import argparse
import itertools
from pathlib import Path

import numpy as np
import onnx
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_static,
)

from onnx2ncnn_opt.api.convert import convert
from onnx2ncnn_opt.errors import Error
from onnx2ncnn_opt.ir.int8 import PRODUCTS
from onnx2ncnn_opt.runtime.base import Array
from scripts.measure.measured import table
from scripts.quantization.noise import agreement, scores, sqnr

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


def row(path: Path, floats: int, data: Array, reference: Array) -> list[str]:
    """Convert and verify a model, and return what it measures."""
    theirs = scores(path, data)
    try:
        made = convert(path, path.with_suffix(""), keep_failed=True, quantized="keep")
    except Error as error:
        return [path.stem, f"{sqnr(theirs, reference):.1f}", "", "", "", "", "", str(error)]
    ours = scores(path.with_suffix(".ncnn.param"), data)
    layers = [layer for layer in made.graph if layer.type in PRODUCTS and "weight_data" in layer.weights]
    layers += [layer for layer in made.graph if layer.type == "Gemm" and layer["constantB"]]
    share = np.mean([any("scale" in name for name in layer.weights) for layer in layers])
    size = path.with_suffix(".ncnn.bin").stat().st_size / floats
    report = made.report
    verdict = "ok" if report and report.ok else "; ".join(map(str, report.outputs)) if report else "none"
    numbers = [f"{sqnr(theirs, reference):.1f}", f"{sqnr(ours, reference):.1f}"]
    numbers += [f"{agreement(theirs, reference):.3f}", f"{agreement(ours, reference):.3f}"]
    return [path.stem, *numbers, f"{share:.0%}", f"{size:.2f}", verdict]


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
            add(*row(path, floats, test, scores(model, test)))


if __name__ == "__main__":
    main()
