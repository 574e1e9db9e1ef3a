"""The C++ header of a tail, compiled for this machine and run in a process of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, run

import numpy as np

from onnx2ncnn_opt.errors import RunError
from onnx2ncnn_opt.onnx.tail.header import header
from onnx2ncnn_opt.onnx.tail.program import Program
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.system import temporary_folder

_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 20.0  # the time limit to compile, and to run
_TENSOR = 10  # int64 numbers of a net_tensor: a pointer, the rank, eight sizes
# A tensor in a file is a net_tensor, with the number of bytes instead of the pointer, and then its data.
_MAIN = """#define NET_TAIL_IMPLEMENTATION
#include "net.tail.h"
#include <cstdio>
#include <vector>
int main(int, char** files) {
    static const int64_t sizes[] = {SIZES};
    net_tensor in[NET_TAIL_INPUTS + 1], out[NET_TAIL_OUTPUTS];
    std::vector<std::vector<double> > data(NET_TAIL_INPUTS);
    FILE* file = fopen(files[1], "rb");
    for (int i = 0; i < NET_TAIL_INPUTS; i++) {
        int64_t bytes = 0;
        if (fread(&in[i], sizeof(in[i]), 1, file) != 1)
            return 1;
        memcpy(&bytes, &in[i], 8);
        data[i].resize(bytes / 8 + 1);
        in[i].data = data[i].data();
        if (fread(data[i].data(), 1, bytes, file) != size_t(bytes))
            return 1;
    }
    void* memory = NULL;
    const int failed = net_tail(in, out, &memory);
    if (failed)
        return printf("error %d", failed), 1;
    file = fopen(files[2], "wb");
    for (int i = 0; i < NET_TAIL_OUTPUTS; i++) {
        int64_t bytes = sizes[i];
        for (int d = 0; d < out[i].rank; d++)
            bytes *= out[i].shape[d];
        fwrite(&bytes, 8, 1, file);
        fwrite(&out[i].rank, 8, 9, file);
        fwrite(out[i].data, 1, bytes, file);
    }
    return fclose(file) ? 1 : 0;
}
"""


class CompiledTail:
    """A tail in C++; the constructor starts the compiler."""

    def __init__(self, program: Program, folder: Path, compiler: str) -> None:
        self.compiler, self._program, self._folder = Path(compiler).name, program, folder
        (folder / "net.tail.h").write_text(header(program, "net"))
        sizes = ", ".join(str(np.dtype(port.dtype).itemsize) for port in program.outputs)
        (folder / "main.cpp").write_text(_MAIN.replace("SIZES", sizes))
        command = [compiler, "-std=c++11", "-O0", "-w", "main.cpp", "-o", "main"]
        self.process = Popen(command, cwd=folder, stdout=PIPE, stderr=STDOUT)

    def finish(self) -> None:
        """Wait for the compiler. Raises OSError with its errors, or TimeoutExpired."""
        text = self.process.communicate(timeout=_SECONDS)[0]
        if self.process.returncode:
            raise OSError(text.decode(errors="replace")[:300])

    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs by name. Raises RunError if a node fails, or TimeoutExpired."""
        feeds, results = self._folder / "in", self._folder / "out"
        feeds.write_bytes(b"".join(_packed(np.asarray(arrays[port.name])) for port in self._program.inputs))
        done = run([self._folder / "main", feeds, results], stdout=PIPE, timeout=_SECONDS, check=False)
        if done.returncode:
            raise RunError(done.stdout.decode(errors="replace") or f"exit code {done.returncode}")
        data, outputs, offset = results.read_bytes(), {}, 0
        for port in self._program.outputs:
            size, rank, *shape = np.frombuffer(data, np.int64, _TENSOR, offset).tolist()
            offset += 8 * _TENSOR + size
            outputs[port.name] = np.frombuffer(data[offset - size : offset], port.dtype).reshape(shape[:rank])
        return outputs


@contextmanager
def compiled(program: Program | None) -> Iterator[CompiledTail | None]:
    """Start to compile a tail, and yield it; yield None if there is no tail or no compiler."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if program is None or compiler is None:
        yield None
        return
    with temporary_folder() as folder:
        tail = CompiledTail(program, Path(folder), compiler)
        with tail.process:
            try:
                yield tail
            finally:
                tail.process.kill()


def _packed(array: Array) -> bytes:
    head = [array.nbytes, array.ndim, *array.shape]
    return np.array([*head, *[0] * (_TENSOR - len(head))], np.int64).tobytes() + array.tobytes()
