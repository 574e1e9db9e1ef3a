import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes fixture results instead of comparing with them."""
    parser.addoption("--update-fixtures", action="store_true", help="rewrite the results in fixtures/, for review")
