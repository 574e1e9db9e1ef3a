"""The program of ONNX Runtime's process. runtime/child.py sends it over stdin, after _worker.py.

A model that needs too much memory or time ends this process instead of the caller's.
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

        # Its exceptions have no common base class. Its Python code raises the others for feeds that do not fit.
        own_errors = [kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception)]
        self.errors = (*own_errors, RuntimeError, TypeError, ValueError, *Server.errors)
        self.ort = onnxruntime
        self.sessions: dict[int, Any] = {}
        return {}

    def do_load(
        self, number: int, path: str | None, data: bytes, threads: int, folder: str | None, **flags: bool
    ) -> None:
        """Create a session from a file, or from the bytes of a model."""
        options = self.ort.SessionOptions()
        options.intra_op_num_threads = threads
        # Threads that spin between nodes take three times the CPU of a small model's run.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.use_deterministic_compute = not flags["fast"]
        if flags["fast"]:  # as ncnn does; it applies to the whole process
            options.add_session_config_entry("session.set_denormal_as_zero", "1")
        else:  # ONNX defines QDQ models in float32
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        if flags["precise"]:  # else sums of two products of uint8 and int8 saturate at 32767 on CPUs without VNNI
            options.add_session_config_entry("session.x64quantprecision", "1")
        if flags["plain"]:
            options.graph_optimization_level = self.ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        # Errors are exceptions; the log on stderr would only repeat them.
        options.log_severity_level = 4
        if folder is not None:
            options.add_session_config_entry(_EXTERNAL_FOLDER, folder)
        if flags["once"]:
            # Weights are not copied into another layout, which also changes the order of sums.
            options.add_session_config_entry("session.disable_prepacking", "1")
        source, wrong = data if path is None else path, ["ExpandElimination"]  # it drops an Expand to no elements, too
        session = self.ort.InferenceSession(source, options, ["CPUExecutionProvider"], disabled_optimizers=wrong)
        self.sessions[number] = session
        self.answer(
            {
                "inputs": [value.name for value in session.get_inputs()],
                "outputs": [value.name for value in session.get_outputs()],
                "with_default": [value.name for value in session.get_overridable_initializers()],
            }
        )

    def do_drop(self, number: int) -> None:
        """Delete a session."""
        self.sessions.pop(number, None)

    def do_run(self, number: int, feeds: list[dict[str, Any]]) -> None:
        """Send the number of outputs, then each output."""
        session = self.sessions[number]
        results: list[Any] = session.run(None, {feed["name"]: feed["array"] for feed in feeds})
        for value, result in zip(session.get_outputs(), results):  # noqa: B905  Python 3.8 has no strict
            if not hasattr(result, "dtype") or result.dtype.hasobject:
                raise TypeError(f"the output '{value.name}' is not a tensor of numbers")
        self.answer({"outputs": len(results)})
        for result in results:
            self.answer({}, result)

    def do_time(self, number: int, feeds: list[dict[str, Any]], seconds: float) -> None:
        """Run for `seconds`, at least once; send the time of each run."""
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
