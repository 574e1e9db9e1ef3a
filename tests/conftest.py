from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from onnx2ncnn_opt.runtime.ncnn import NcnnWorker
    from testing.conformance import Harness


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for fixtures: to write results instead of comparing with them, and where guards run."""
    parser.addoption("--update-fixtures", action="store_true", help="rewrite the results in fixtures/, for review")
    parser.addoption("--on", help="run ncnn on this device instead: a target of `convert --on`")
    parser.addoption("--all-lengths", action="store_true", help="run the guards on rows of every length from 1 to 33")


@pytest.fixture(scope="session")
def worker(request: pytest.FixtureRequest) -> Iterator[NcnnWorker]:
    """The ncnn process of this run."""
    from onnx2ncnn_opt.runtime.targets import find_target
    from testing.worker import WORKER

    WORKER.target = find_target(request.config.getoption("--on"))
    with WORKER:
        yield WORKER


@pytest.fixture(scope="session")
def harness(worker: NcnnWorker) -> Iterator[Harness]:
    """What converts, runs and compares cases."""
    from testing.conformance import Harness

    with Harness(worker) as harness:
        yield harness
