"""Two rules of the test run, loaded by `conftest.py`.

A skip fails the run, since a test that is not run protects nothing. Only tests with a mark of `MAY_SKIP` can be
skipped, with a reason; CONTRIBUTING.md says what each mark needs. The time limit is 300 s for a `slow` test, and 600 s
for a test with a Ray cluster.
"""

from collections.abc import Generator
from typing import TypeVar

import pytest

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)

MAY_SKIP = ("gpu", "real", "kernels", "hosts", "clients", "prometheus", "image", "debian", "browser", "curl", "index")
SLOW_TIMEOUT_S, RAY_TIMEOUT_S = 300, 600


def skip_becomes_failure(report: Report) -> Report:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"{reason}: a skip fails the run, except for {', '.join(MAY_SKIP)} with a reason"
    return report


def has_reason(report: pytest.TestReport) -> bool:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    return reason.removeprefix("Skipped:").strip() not in ("", "unconditional skip")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        may_skip = any(item.get_closest_marker(name) for name in MAY_SKIP)
        if not (may_skip and has_reason(report)):
            return skip_becomes_failure(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return skip_becomes_failure(report) if report.skipped else report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(RAY_TIMEOUT_S if item.get_closest_marker("ray") else SLOW_TIMEOUT_S))
