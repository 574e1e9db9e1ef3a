"""Run nets of `--split llm` in ncnn_llm itself, and count its greedy tokens that are those of ONNX Runtime.

    python -m scripts.clients.ncnn_llm NCNN NCNN_LLM JSON [-k llama]

NCNN is an installed ncnn (`cmake --install`, without Vulkan), NCNN_LLM a checkout of github.com/nihui/ncnn_llm, and
JSON the folder with nlohmann/json.hpp. The models are those of fixtures/llm: a token is a character of the prompt.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from onnx2ncnn_opt.manifest import read_manifest
from testing.exports import ROOT, refilled
from testing.ncnn_llm import onnxruntime_scores

_PROMPTS, _COUNT = (16, 13), 24  # tokens
_BYTES = [*range(33, 127), 161, 162]  # of tokens 0 to 95: those that byte-level BPE writes as they are
_MAIN = """
#include "ncnn_llm_gpt.h"
int main(int, char** argv)
{
    ncnn_llm_gpt model(argv[1], false, 1);
    GenerateConfig config;
    config.max_new_tokens = %d;
    config.do_sample = 0;
    config.repetition_penalty = config.top_p = config.temperature = 1.f;
    config.top_k = 0;
    printf("bytes:");
    model.generate(model.prefill(argv[2]), config, [](const std::string& text) {
        for (unsigned char c : text) printf(" %%d", c);
    });
}
"""


def build(ncnn: Path, runner: Path, headers: Path, folder: Path) -> Path:
    """Compile ncnn_llm with a program that prints the bytes of greedy tokens."""
    (folder / "main.cpp").write_text(_MAIN % _COUNT)
    sources = [path for path in (runner / "src").rglob("*.cpp") if "nllb" not in path.name]
    flags = ["-std=c++20", "-O1", "-DNCNN_LLM_WITH_OPENCV=0", f"-I{runner}/src", f"-I{headers}"]
    flags += [f"-I{ncnn}/include/ncnn", "main.cpp", *map(str, sources), f"-L{ncnn}/lib", "-lncnn", "-fopenmp"]
    subprocess.run(["c++", *flags, "-o", "main"], cwd=folder, check=True)
    return folder / "main"


def run(path: Path, program: Path, folder: Path) -> str:
    """Return in words how many tokens are the model's, or the error of `convert`."""
    model = bytes(refilled(path).SerializeToString())
    (folder / "model.onnx").write_bytes(model)
    command = [sys.executable, "-m", "onnx2ncnn_opt", "convert", "model.onnx", "-o", "nets", "--split", "llm"]
    converted = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if converted.returncode:
        return converted.stderr.splitlines()[-1]
    config = json.loads((folder / "nets" / "model.json").read_text())
    (folder / "nets" / "vocab.txt").write_text("\n".join(map(chr, _BYTES)) + "\n", encoding="utf-8")
    (folder / "nets" / "merges.txt").touch()
    said = [config["setting"]["rope"]["type"]]
    for length in _PROMPTS:
        prompt = np.random.default_rng(0).integers(3, 94, length).tolist()
        expected = onnxruntime_scores(model, read_manifest(folder / "nets.ncnn.json"), prompt, _COUNT).argmax(1)
        text = "".join(chr(_BYTES[token]) for token in prompt)
        ended = subprocess.run([program, "nets", text], cwd=folder, capture_output=True)
        if ended.returncode:
            return f"ncnn_llm ends with {ended.returncode}"
        tokens = [_BYTES.index(int(word)) for word in ended.stdout.decode().partition("bytes:")[2].split()]
        same = sum(a == b for a, b in zip(tokens, expected.tolist(), strict=True))
        said.append(f"{same} of {_COUNT} after a prompt of {length}")
    return ", ".join(said)


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("ncnn", "ncnn_llm", "json"):
        parser.add_argument(name, type=Path)
    parser.add_argument("-k", default="")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        program = build(options.ncnn.absolute(), options.ncnn_llm.absolute(), options.json.absolute(), Path(folder))
        for path in sorted(path for path in (ROOT / "fixtures" / "llm").glob("*.onnx") if options.k in path.stem):
            with TemporaryDirectory() as work:
                print(path.stem, run(path, program, Path(work)), sep="\t", flush=True)


if __name__ == "__main__":
    main()
