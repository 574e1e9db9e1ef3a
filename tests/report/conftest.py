import pytest

from testing.browser import find_browser

collect_ignore = [] if find_browser() else ["test_page_in_browser.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was not tried."""
    if collect_ignore:
        terminalreporter.write_line("the report page was NOT tried in a browser: there is no Chromium", yellow=True)
