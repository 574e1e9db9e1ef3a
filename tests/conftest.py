from __future__ import annotations

import gc
import os
import warnings
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
    from testing.conformance import Harness

# glibc fills memory that child processes get: a net that reads what nobody wrote is wrong in every run, not by chance.
os.environ.setdefault("MALLOC_PERTURB_", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the command sets it: threads would spin in each process


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options: to write fixtures instead of comparing with them, where nets run, and how many cases."""
    parser.addoption("--update-fixtures", action="store_true", help="rewrite the results in fixtures/, for review")
    parser.addoption("--on", help="run ncnn on this device instead: a target of `convert --on`")
    parser.addoption("--thorough", action="store_true", help="run every case, length and exporter, not a sample")


def pytest_sessionstart() -> None:
    """Import what threads share: pytest rewrites modules, for which CPython 3.11 fails in two threads at once."""
    for room in ("api", "verification"):
        package = import_module(f"onnx2ncnn_opt.{room}")
        for module in iter_modules(package.__path__, f"{package.__name__}."):
            import_module(module.name)


def pytest_collection_finish() -> None:
    """Keep what all tests share out of garbage collections, which would visit it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def worker(request: pytest.FixtureRequest) -> Iterator[NcnnWorker]:
    """The ncnn process of this run."""
    from onnx2ncnn_opt.runtime.targets import find_target
    from testing.worker import WORKER

    WORKER.target = find_target(request.config.getoption("--on"))
    with WORKER:
        yield WORKER


@pytest.fixture(scope="module")
def workers(request: pytest.FixtureRequest) -> Iterator[dict[str, NcnnWorker]]:
    """The devices: the target of --on; else this machine's CPU, and Vulkan where there is a driver."""
    from onnx2ncnn_opt.errors import RunError, UsageError
    from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
    from onnx2ncnn_opt.runtime.targets import LOCAL, find_target

    on = request.config.getoption("--on")
    targets = {on: find_target(on)} if on else {"CPU": LOCAL, "Vulkan": replace(LOCAL, vulkan=True)}
    with ExitStack() as stack:
        found = {name: stack.enter_context(NcnnWorker(target)) for name, target in targets.items()}
        try:
            if not on:
                found["Vulkan"].checked(["fp32"])
        except (RunError, UsageError) as error:
            warnings.warn(f"nothing runs on Vulkan here: {error}", stacklevel=1)
            found.pop("Vulkan")
        yield found


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    """True if every case shall run."""
    return bool(request.config.getoption("--thorough"))


@pytest.fixture(scope="session")
def harness(worker: NcnnWorker) -> Harness:
    """The harness that converts, runs and compares cases."""
    from testing.conformance import Harness

    return Harness(worker)
