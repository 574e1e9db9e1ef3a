"""The process that ONNX Runtime runs in; sent to it over its stdin by runtime/child.py, after _worker.py.

A model that takes all memory, or runs for ever, ends this process instead of the caller's.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnx2ncnn_opt.runtime._worker import Server, main

_EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"


class OrtServer(Server):
    """Holds sessions by their number, and runs them."""

    def start(self, config: dict[str, Any]) -> dict[str, Any]:
        """Import ONNX Runtime."""
        import onnxruntime  # type: ignore[import-untyped]
        from onnxruntime.capi import onnxruntime_pybind11_state as state  # type: ignore[import-untyped]

        # Its exceptions have no base of their own; the others come from its Python side, on feeds that do not fit.
        own = [kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)]
        self.errors = (*own, RuntimeError, TypeError, ValueError, *Server.errors)
        self.ort = onnxruntime
        self.sessions: dict[int, Any] = {}
        return {}

    def do_load(
        self, number: int, path: str | None, data: bytes, threads: int, folder: str | None, **flags: bool
    ) -> None:
        """Make a session of a file, or of the bytes of a model."""
        options = self.ort.SessionOptions()
        options.intra_op_num_threads = threads
        # Threads that spin between nodes take three times the CPU of a small model's run.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.use_deterministic_compute = not flags["fast"]
        if flags["fast"]:  # as ncnn does; it holds for the process
            options.add_session_config_entry("session.set_denormal_as_zero", "1")
        else:  # QDQ models are right in float32, as ONNX defines them
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        if flags["precise"]:  # else sums of two products of uint8 and int8 saturate at 32767 on CPUs without VNNI
            options.add_session_config_entry("session.x64quantprecision", "1")
        if flags["plain"]:
            options.graph_optimization_level = self.ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        # Its errors come as exceptions; the log on stderr would only repeat them.
        options.log_severity_level = 4
        if folder is not None:
            options.add_session_config_entry(_EXTERNAL_FOLDER, folder)
        if flags["once"]:
            # Weights are not copied into another layout. That other layout also adds up sums in another order.
            options.add_session_config_entry("session.disable_prepacking", "1")
        session = self.ort.InferenceSession(data if path is None else path, options, providers=["CPUExecutionProvider"])
        self.sessions[number] = session
        self.answer(
            {
                "inputs": [value.name for value in session.get_inputs()],
                "outputs": [value.name for value in session.get_outputs()],
                "with_default": [value.name for value in session.get_overridable_initializers()],
            }
        )

    def do_drop(self, number: int) -> None:
        """Forget a session."""
        self.sessions.pop(number, None)

    def do_run(self, number: int, feeds: list[dict[str, Any]]) -> None:
        """Answer with the number of outputs, then with one after the other."""
        session = self.sessions[number]
        results: list[Any] = session.run(None, {feed["name"]: feed["array"] for feed in feeds})
        for value, result in zip(session.get_outputs(), results):  # noqa: B905  Python 3.8 has no strict
            if not hasattr(result, "dtype") or result.dtype.hasobject:
                raise TypeError(f"the output '{value.name}' is not a tensor of numbers")
        self.answer({"outputs": len(results)})
        for result in results:
            self.answer({}, result)

    def do_time(self, number: int, feeds: list[dict[str, Any]], seconds: float) -> None:
        """Run for some time; the answer has the seconds of each run."""
        arrays = {feed["name"]: feed["array"] for feed in feeds}
        times: list[float] = []
        end = time.perf_counter() + seconds
        while not times or time.perf_counter() < end:
            start = time.thread_time()
            self.sessions[number].run(None, arrays)
            times.append(time.thread_time() - start)
        self.answer({"times": times})


if __name__ == "__main__":
    main(OrtServer)
