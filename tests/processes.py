"""`--processes N` runs the tests in N processes, which pytest forks after it has collected the tests.

    pytest: imports, collects ──fork──► process 0 ──reports──► pytest: prints them
                              ──fork──► process 1 ──reports──►

Imports and collection take as long as a fifth of `make check`, and pytest-xdist repeats both in every process. Each
process takes the tests of one module after the other from a queue, so that the fixtures of a module are made once and
all processes end at about the same time. The queue is a pipe that has the number of each module; a read removes one.
"""

import json
import mmap
import os
import signal
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.connection import Connection, Pipe, wait

import pytest

NUMBER_BYTES = 2
SHORT_S = 0.005
"""`--durations` does not show shorter set-ups and tear-downs, so their reports are not sent."""


@dataclass(frozen=True)
class TestProcess:
    """A forked process that runs tests."""

    __test__ = False

    pid: int
    reports: Connection


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, help="number of processes that run the tests")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Runs the tests in several processes, if several are requested. It returns in each of them."""
    units = units_of(session.items)
    count = min(session.config.getoption("processes"), len(units))
    if count < 2 or session.testsfailed or session.config.option.collectonly:
        return None
    queue = queue_of(len(units))
    current = memoryview(mmap.mmap(-1, 4 * count)).cast("i")  # [num_processes]: place of the test that runs
    processes: list[TestProcess] = []
    for number in range(count):
        receiving, sending = Pipe(duplex=False)
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            pid = os.fork()  # pyarrow's allocator has a thread, about which Python 3.12 warns; it survives a fork
        if pid == 0:
            for open_end in (receiving, *(other.reports for other in processes)):
                open_end.close()
            run_tests(session, places_in(queue, units), Reporter(session.config, sending, current[number : number + 1]))
            return True
        sending.close()
        processes.append(TestProcess(pid, receiving))
    os.close(queue)
    print_reports(session, processes, current)
    return True


def units_of(items: Sequence[pytest.Item]) -> list[list[int]]:
    """Returns the places of the tests of each module. Modules with slow tests come first, so that the last ones are
    short."""
    units = [[place for place, _ in unit] for _, unit in groupby(enumerate(items), lambda each: each[1].path)]
    return sorted(units, key=lambda unit: not any(items[place].get_closest_marker("slow") for place in unit))


def queue_of(length: int) -> int:
    """Returns the file descriptor from which processes read the numbers of units."""
    queue, end = os.pipe()
    os.write(end, b"".join(number.to_bytes(NUMBER_BYTES, "little") for number in range(length)))
    os.close(end)
    return queue


def places_in(queue: int, units: Sequence[Sequence[int]]) -> Iterator[int]:
    """Yields the places of tests, and takes a unit from the queue when the unit before it has been yielded."""
    while number := os.read(queue, NUMBER_BYTES):
        yield from units[int.from_bytes(number, "little")]


class Reporter:
    """Replaces the terminal reporter in a forked process. It sends the reports to pytest."""

    def __init__(self, config: pytest.Config, reports: Connection, current: memoryview) -> None:
        self._tw = config.get_terminal_writer()  # `Config.get_terminal_writer` reads this attribute
        self._config, self._reports, self._current = config, reports, current

    def start(self, place: int) -> None:
        """Notes which test runs next."""
        self._current[0] = place

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed or report.duration >= SHORT_S:
            data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
            self._reports.send_bytes(json.dumps(data, default=str).encode())

    def close(self) -> None:
        """Reports that this process has run all its tests. It is not called if the process dies."""
        self._reports.send_bytes(b"")


def run_tests(session: pytest.Session, places: Iterator[int], reporter: Reporter) -> None:
    """Runs tests in this forked process until the queue is empty."""
    plugins = session.config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.register(reporter, "terminalreporter")
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # the processes would share its files
    capture.start_global_capturing()
    capture.suspend_global_capture()
    place = next(places, None)
    while place is not None and not session.shouldfail and not session.shouldstop:
        item, following = session.items[place], next(places, None)
        reporter.start(place)
        nextitem = None if following is None else session.items[following]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        place = following
    reporter.close()


def print_reports(session: pytest.Session, processes: Sequence[TestProcess], current: memoryview) -> None:
    """Receives the reports of all processes until they end. A process that dies is a failure of the test that it
    ran."""
    running = {process.reports: process for process in processes}
    failed = dict.fromkeys(processes, False)
    try:
        while running:
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                process = running[connection]
                report = received(session.config, connection)
                if report is not None:
                    failed[process] |= report.failed
                    session.config.hook.pytest_runtest_logreport(report=report)
                    continue
                del running[connection]
                _, status = os.waitpid(process.pid, 0)
                code = os.waitstatus_to_exitcode(status)
                if code != (pytest.ExitCode.TESTS_FAILED if failed[process] else pytest.ExitCode.OK):
                    item = session.items[current[processes.index(process)]]
                    session.config.hook.pytest_runtest_logreport(report=report_of_end(item, code))
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
    finally:
        for process in running.values():
            os.kill(process.pid, signal.SIGINT)
            os.waitpid(process.pid, 0)


def received(config: pytest.Config, connection: Connection) -> pytest.TestReport | None:
    """Returns the next report, or None if the process has run its tests or has died."""
    try:
        message = connection.recv_bytes()
    except EOFError:
        return None
    if not message:
        return None
    data = json.loads(message)
    if isinstance(data["longrepr"], list):
        data["longrepr"] = tuple(data["longrepr"])  # the place and the reason of a skip
    report = config.hook.pytest_report_from_serializable(config=config, data=data)
    assert isinstance(report, pytest.TestReport)
    return report


def report_of_end(item: pytest.Item, code: int) -> pytest.TestReport:
    """Returns the failure of a test whose process ended with this code; negative: with a signal."""
    end = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    text = f"The test process ended {end}, in or after this test. Its other tests of this module did not run."
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
