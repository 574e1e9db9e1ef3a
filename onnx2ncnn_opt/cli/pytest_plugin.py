"""A pytest plug-in that runs a list of models as tests: ``pytest ncnn-check.toml -n 4``.

pytest finds it by its entry point. It collects only a .toml file that is an argument of pytest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from onnx2ncnn_opt.regression.config import Config, Model
    from onnx2ncnn_opt.regression.result import ModelResult


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options that replace keys of the file, and choose a part of it."""
    group = parser.getgroup("ncnn", "ncnn nets (ncnn-check.toml)")
    group.addoption("--ncnn-on", metavar="TARGET", help="run the nets on this device, as `onnx2ncnn-opt check --on`")
    group.addoption("--ncnn-modes", metavar="MODE,...", help="run them in these modes")
    group.addoption("--ncnn-shard", metavar="I/N", default="1/1", help="take the I-th of N parts of the models")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Return the models of a file that the user named."""
    if file_path.suffix != ".toml" or not parent.session.isinitpath(file_path):
        return None
    collected: pytest.Collector = ModelsFile.from_parent(parent, path=file_path)
    return collected


class ModelsFile(pytest.File):
    """A list of models."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield a test for each model."""
        from onnx2ncnn_opt.errors import UsageError
        from onnx2ncnn_opt.regression.config import parse_shard, read_config

        option = self.config.getoption
        try:
            modes = (option("--ncnn-modes") or "").split(",")
            config = read_config(self.path).everywhere(on=option("--ncnn-on"), modes=[*filter(None, modes)])
            config = config.chosen(shard=parse_shard(option("--ncnn-shard")))
        except UsageError as error:
            raise self.CollectError(str(error)) from error
        for model in config.models:
            yield ModelItem.from_parent(self, name=model.name, checked=config, model=model)


class NetFailure(Exception):
    """A model that does not pass."""

    def __init__(self, result: ModelResult) -> None:
        super().__init__(result.name)
        self.result = result


class ModelItem(pytest.Item):
    """One model; the properties of its JUnit record have the measurements."""

    def __init__(self, *, checked: Config, model: Model, **options: Any) -> None:
        super().__init__(**options)
        self.checked, self.model = checked, model

    def runtest(self) -> None:
        """Convert the model, and fail if its net does not pass."""
        from onnx2ncnn_opt.cli.check_report import details
        from onnx2ncnn_opt.regression.run import check_model

        result = check_model(self.checked, self.model)
        self.user_properties += [(m.name, m.measured) for m in result.measurements if m.measured is not None]
        others = [f"{kind}: {text}" for kind, text in details(result) if kind != "failed"]
        if others:
            self.add_report_section("call", "notes", "\n".join(others))
        if not result.ok:
            raise NetFailure(result)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the failures, without a traceback."""
        if not isinstance(excinfo.value, NetFailure):
            return super().repr_failure(excinfo, style)
        from onnx2ncnn_opt.cli.check_report import failure_text

        return "\n".join(failure_text(failure) for failure in excinfo.value.result.failures)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return the file and the name under which pytest lists the test."""
        return self.path, None, self.name
