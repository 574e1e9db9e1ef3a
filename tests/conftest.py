from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
    from testing.conformance import Harness

# glibc fills memory that child processes get: a net that reads what nobody wrote is wrong in every run, not by chance.
os.environ.setdefault("MALLOC_PERTURB_", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the command sets it: threads would spin in each process
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell lets what it starts in the background ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options: to write fixtures instead of comparing with them, where nets run, and how many cases."""
    parser.addoption("--update-fixtures", action="store_true", help="rewrite the results in fixtures/, for review")
    parser.addoption("--on", help="run ncnn on this device instead: a target of `convert --on`")
    parser.addoption("--thorough", action="store_true", help="run every case, length and exporter, not a sample")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Start more processes than there are cores: tests wait for other processes a third of their time."""
    return ((os.cpu_count() or 1) * 3 + 1) // 2


def pytest_sessionstart() -> None:
    """Fork workers; import what threads share: pytest rewrites modules, for which CPython 3.11 fails in two threads."""
    from testing.forks import install

    install()
    for room in ("api", "inputs", "precision", "verdict", "verification"):
        package = import_module(f"onnx2ncnn_opt.{room}")
        for module in iter_modules(package.__path__, f"{package.__name__}."):
            import_module(module.name)


def pytest_collection_finish() -> None:
    """Keep what all tests share out of garbage collections, which would visit it again and again."""
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests of a `device` on the target of --on; else on this machine's CPU, and on Vulkan."""
    if "device" in metafunc.fixturenames:
        on = metafunc.config.getoption("--on")
        here = [pytest.param(None, id="CPU"), pytest.param("vulkan", marks=pytest.mark.needs("Vulkan"))]
        metafunc.parametrize("device", [on] if on else here, indirect=True, scope="module")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only --thorough runs."""
    if not config.getoption("--thorough"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("thorough")])
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave a test out if the machine lacks what it needs."""
    for mark in item.iter_markers("needs"):
        from testing.machine import lack

        for name in mark.args:
            if reason := lack(name):
                pytest.skip(f"{name} ({reason})")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what was not run."""
    skipped = [report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped")]
    if skipped:
        counts = Counter(text.partition(" (")[0] for text in skipped)
        texts = {text.partition(" (")[0]: text for text in skipped}  # whose details differ, as addresses do
        tests = ", ".join(f"{texts[name]}: {counts[name]}" for name in sorted(counts))
        terminalreporter.write_line(f"not run here, and how many tests: {tests}", yellow=True)


@pytest.fixture(scope="session")
def worker(request: pytest.FixtureRequest) -> Iterator[NcnnWorker]:
    """The ncnn process of this run."""
    from onnx2ncnn_opt.runtime.targets import find_target
    from testing.worker import WORKER

    WORKER.target = find_target(request.config.getoption("--on"))
    with WORKER:
        yield WORKER


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Iterator[NcnnWorker]:
    """The ncnn process of a device."""
    from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
    from onnx2ncnn_opt.runtime.targets import find_target

    with NcnnWorker(find_target(request.param)) as worker:
        yield worker


@pytest.fixture(
    params=[
        pytest.param("interface", marks=pytest.mark.needs("C++")),
        pytest.param("interface, by clang", marks=pytest.mark.needs("clang")),
        pytest.param("headers", marks=pytest.mark.needs("C++", "ncnn's headers")),
    ]
)
def compiles(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    """Compile a program of `example` against the parts of ncnn's interface that it uses, or ncnn's own headers."""
    from testing.programs import INTERFACE, compile_against, find_headers
    from testing.tails import CLANG, COMPILER

    compiler = CLANG if "clang" in request.param else COMPILER
    return partial(compile_against, find_headers() if request.param == "headers" else INTERFACE, compiler=compiler)


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    """True if every case shall run."""
    return bool(request.config.getoption("--thorough"))


@pytest.fixture(scope="session")
def harness(worker: NcnnWorker) -> Harness:
    """The harness that converts, runs and compares cases."""
    from testing.conformance import Harness

    return Harness(worker)
