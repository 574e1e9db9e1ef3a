import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for fixtures: to write results instead of comparing with them, and where guards run."""
    parser.addoption("--update-fixtures", action="store_true", help="rewrite the results in fixtures/, for review")
    parser.addoption("--on", help="run the guards on this device instead: a target of `convert --on`")
    parser.addoption("--all-lengths", action="store_true", help="run the guards on rows of every length from 1 to 33")
