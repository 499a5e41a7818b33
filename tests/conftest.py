"""For all tests: where REGREPRO_REQUIRE_LAB is set, as scripts/test does on CI, no lab test may skip."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

# A shell has what it starts in the background ignore SIGINT, nohup has it ignore SIGHUP, and what a test
# starts inherits that.
for number, action in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, action)

# An event that is not as declared is an error of the code here, and raises.
os.environ["REGREPRO_STRICT_RECORD"] = "1"

REQUIRED = bool(os.environ.get("REGREPRO_REQUIRE_LAB"))
LAB = Path(__file__).parent / "lab"
# Attacks on the verdicts are scenarios for `regrepro lab run`, and root's business.
collect_ignore = ["attacks"]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.CallInfo[None], None]:
    """Turn the skip of a lab test into a failure that says why it would have been skipped."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if REQUIRED and report.skipped and item.get_closest_marker("lab") and not hasattr(report, "wasxfail"):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} may not be skipped here: {why}"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fail a run that should have had lab tests and found none."""
    if REQUIRED and not any(item.get_closest_marker("lab") for item in session.items):
        raise pytest.UsageError("no lab test was collected, and REGREPRO_REQUIRE_LAB asks for them")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A lab file that skips itself as a whole is a skipped lab."""
    if REQUIRED and report.skipped and str(report.nodeid).startswith("tests/lab"):
        raise pytest.UsageError(f"{report.nodeid} may not be skipped here: {report.longrepr}")
