import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from onnx2ncnn_opt.regression import judge, meter, run
from onnx2ncnn_opt.regression.processes import EndedProcess
from testing import command


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """Judge nets in this process, measure latencies shortly, and convert in a fork.

    Imports take most of the time of the processes that a check starts. test_ci_page.py and tests/cli start them.
    """
    python, called = run._Task.python, run._Task.called

    def quick_called(task: run._Task, function: str) -> tuple[EndedProcess, Any]:
        if function == "judge":
            return EndedProcess(0, "", ""), judge.judge(pickle.loads((task.folder / "request").read_bytes()))
        return called(task, function)

    def quick_python(task: run._Task, *words: str, **options: Any) -> EndedProcess:
        if words[:2] == ("-m", "onnx2ncnn_opt"):
            ended = command.run(task.folder, *words[2:])
            return EndedProcess(ended.code, f"ended with exit code {ended.code}", ended.err)
        return python(task, *words, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run._Task, "called", quick_called)
        patch.setattr(run._Task, "python", quick_python)
        patch.setattr(meter, "_SECONDS", 0.2)
        yield
