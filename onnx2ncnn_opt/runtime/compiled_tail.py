"""The C++ header of a tail, compiled for this machine and run in a process of its own."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, run

import numpy as np

from onnx2ncnn_opt.errors import RunError
from onnx2ncnn_opt.runtime.base import Array
from onnx2ncnn_opt.runtime.ending import stop
from onnx2ncnn_opt.system import temporary_folder
from onnx2ncnn_opt.tail.header import header
from onnx2ncnn_opt.tail.program import Program

_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 20.0  # the time limit to compile, and to run
_TENSOR = 10  # int64 numbers of a net_tensor: a pointer, the rank, eight sizes
# A tensor in a file is a net_tensor, with the number of bytes instead of the pointer, and then its data.
_MAIN = Path(__file__).with_name("tail_main.cpp.in")


class CompiledTail:
    """A tail in C++; the constructor starts the compiler."""

    def __init__(self, program: Program, folder: Path, compiler: str) -> None:
        self.compiler, self._program, self._folder = Path(compiler).name, program, folder
        (folder / "net.tail.h").write_text(header(program, "net"))
        sizes = ", ".join(str(np.dtype(port.dtype).itemsize) for port in program.outputs)
        (folder / "main.cpp").write_text(_MAIN.read_text(encoding="utf-8").replace("SIZES", sizes))
        command = [compiler, "-std=c++11", "-O0", "-w", "main.cpp", "-o", "main"]
        self.process = Popen(command, cwd=folder, stdout=PIPE, stderr=STDOUT, start_new_session=True)

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
                if tail.process.poll() is None:
                    stop(tail.process)


def _packed(array: Array) -> bytes:
    head = [array.nbytes, array.ndim, *array.shape]
    return np.array([*head, *[0] * (_TENSOR - len(head))], np.int64).tobytes() + array.tobytes()
