"""Run a streaming transducer of our nets in sherpa-ncnn's package, and compare its tokens with those of ONNX Runtime.

    pip install sherpa-ncnn kaldi-native-fbank
    python -m scripts.clients.sherpa_ncnn ICEFALL [--write]

ICEFALL is a checkout of github.com/k2-fsa/icefall, which has the models that sherpa-ncnn loads. They have random
weights. Encoder, decoder and joiner become nets by `convert --blob-names pnnx`; the encoder's .param gets the layer
SherpaMetaData. The sound is noise of changing loudness.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import kaldi_native_fbank as knf  # type: ignore[import-not-found]
import numpy as np
import onnxruntime  # type: ignore[import-untyped]
import sherpa_ncnn  # type: ignore[import-not-found]
import torch
from numpy.typing import NDArray

from scripts.measure.measured import parser_of, table

Array = NDArray[Any]
_VOCABULARY, _CONTEXT = 94, 2
_WIDTH, _HIDDEN, _LAYERS = 256, 512, 4
_SEGMENT, _OFFSET = 9, 4  # frames, of sherpa-ncnn's LstmModel
_SECONDS, _RATE = 6, 16000
_PARTS = ("encoder", "decoder", "joiner")
_COLUMNS = ("model", "tokens", "expected", "equal")


def modules(icefall: Path) -> tuple[Any, Any, Any]:
    """Return the LSTM transducer's encoder, decoder and joiner, without what only training needs."""
    sys.path.insert(0, str(icefall / "egs" / "librispeech" / "ASR" / "lstm_transducer_stateless2"))
    utilities = ModuleType("icefall.utils")  # the real one needs k2
    utilities.__dict__["is_jit_tracing"] = torch.jit.is_tracing
    sys.modules |= {"icefall": ModuleType("icefall"), "icefall.utils": utilities}
    from decoder import Decoder  # type: ignore[import-not-found]
    from joiner import Joiner  # type: ignore[import-not-found]
    from lstm import RNN  # type: ignore[import-not-found]
    from scaling_converter import convert_scaled_to_non_scaled  # type: ignore[import-not-found]

    torch.manual_seed(0)
    encoder = RNN(80, 4, _WIDTH, 2 * _WIDTH, _HIDDEN, _LAYERS, is_pnnx=True)
    decoder, joiner = Decoder(_VOCABULARY, _WIDTH, 0, _CONTEXT), Joiner(_WIDTH, _WIDTH, _WIDTH, _VOCABULARY)
    whole = torch.nn.ModuleList([encoder, decoder, joiner]).eval()
    convert_scaled_to_non_scaled(whole, inplace=True, is_onnx=True)
    joiner.output_linear.weight.data.mul_(8)  # else one token wins always
    return encoder, decoder, joiner


def export(icefall: Path, folder: Path) -> None:
    """Export the three models with the inputs and outputs that pnnx gives their nets."""
    encoder, decoder, joiner = modules(icefall)
    feeds = (torch.zeros(1, _SEGMENT, 80), torch.tensor([_SEGMENT]), encoder.get_init_states())
    names = (["x", "x_lens", "h", "c"], ["out", "out_lens", "next_h", "next_c"])
    exports: dict[str, tuple[Any, tuple[Any, ...], tuple[list[str], list[str]]]] = {
        "encoder": (encoder, feeds, names),
        "decoder": (decoder, (torch.zeros(1, _CONTEXT, dtype=torch.int64), torch.tensor([False])), (["y"], ["out"])),
        "joiner": (joiner, (torch.zeros(1, _WIDTH), torch.zeros(1, _WIDTH)), (["encoded", "decoded"], ["logits"])),
    }
    for part, (model, arguments, (inputs, outputs)) in exports.items():
        path = str(folder / f"{part}.onnx")
        torch.onnx.export(
            model, arguments, path, input_names=inputs, output_names=outputs, opset_version=17, dynamo=False
        )


def convert(folder: Path) -> None:
    """Convert the models; sherpa-ncnn's build has no layer Normalize, and the states' second axis is the batch."""
    for part in _PARTS:
        words = ["-m", "onnx2ncnn_opt", "convert", f"{part}.onnx", "--blob-names", "pnnx", "--effort", "quick", "-q"]
        states = ["--batch-axis", "h:1", "--batch-axis", "c:1", "--skip", "fuse_rmsnorm"] if part == "encoder" else []
        subprocess.run([sys.executable, *words, *states], cwd=folder, check=True)
    path = folder / "encoder.ncnn.param"
    magic, counts, *layers = path.read_text().splitlines()
    number, blobs = map(int, counts.split())
    meta = f"SherpaMetaData sherpa_meta_data1 0 0 0=3 1={_LAYERS} 2={_WIDTH} 3={_HIDDEN}"
    path.write_text("\n".join([magic, f"{number + 1} {blobs}", meta, *layers, ""]))


def sound() -> Array:
    """Return noise that changes its loudness ten times a second."""
    rng = np.random.default_rng(0)
    loudness = np.repeat(rng.random(_SECONDS * 10), _RATE // 10) * 0.3
    return (rng.standard_normal(_SECONDS * _RATE) * loudness).astype(np.float32)


def found(folder: Path) -> list[int]:
    """Return the tokens of sherpa-ncnn's greedy search."""
    (folder / "tokens.txt").write_text("".join(f"{chr(33 + i)} {i}\n" for i in range(_VOCABULARY)))
    files = {f"{part}_{end}": str(folder / f"{part}.ncnn.{end}") for part in _PARTS for end in ("param", "bin")}
    recognizer = sherpa_ncnn.Recognizer(tokens=str(folder / "tokens.txt"), **files, num_threads=1)
    recognizer.accept_waveform(_RATE, sound())
    recognizer.input_finished()
    return list(recognizer.tokens)


def expected(folder: Path) -> list[int]:
    """Return the tokens of a greedy search in ONNX Runtime."""
    runs = [
        onnxruntime.InferenceSession(folder / f"{part}.onnx", providers=["CPUExecutionProvider"]) for part in _PARTS
    ]
    encoder, decoder, joiner = (session.run for session in runs)
    options = knf.FbankOptions()
    options.frame_opts.dither, options.frame_opts.snip_edges = 0, False
    options.mel_opts.num_bins, options.mel_opts.high_freq = 80, -400
    bank = knf.OnlineFbank(options)
    bank.accept_waveform(_RATE, sound().tolist())
    bank.input_finished()
    frames = np.stack([bank.get_frame(i) for i in range(bank.num_frames_ready)])
    h, c = np.zeros((_LAYERS, 1, _WIDTH), np.float32), np.zeros((_LAYERS, 1, _HIDDEN), np.float32)
    tokens = [0] * _CONTEXT
    for start in range(0, len(frames) - _SEGMENT, _OFFSET):
        x = frames[None, start : start + _SEGMENT]
        encoded, h, c = encoder(["out", "next_h", "next_c"], {"x": x, "x_lens": np.array([_SEGMENT]), "h": h, "c": c})
        for row in encoded[0]:
            [decoded] = decoder(None, {"y": np.array([tokens[-_CONTEXT:]])})
            [logits] = joiner(None, {"encoded": row[None], "decoded": decoded[0]})
            best = int(logits.argmax())
            tokens += [best] if best not in (0, 2) else []  # blank and unknown
    return tokens[_CONTEXT:]


def main() -> None:
    """Print the table."""
    arguments = parser_of(__doc__, "icefall").parse_args()
    with TemporaryDirectory() as name, table("sherpa_ncnn", _COLUMNS, write=arguments.write) as add:
        folder = Path(name)
        export(arguments.icefall, folder)
        convert(folder)
        a, b = found(folder), expected(folder)
        add("lstm_transducer_stateless2", len(a), len(b), sum(x == y for x, y in zip(a, b, strict=False)))


if __name__ == "__main__":
    main()
