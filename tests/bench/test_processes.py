"""A server's processes are found by its port, and their memory and processor time are measured."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from bench.servers.processes import ServerProcesses, processes_at

MIB = 2**20
SERVER = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
for line in sys.stdin:
    if line == "burn\\n":
        until = time.process_time() + 0.1
        while time.process_time() < until: pass
    else:
        used = b"x" * int(line)
        del used
    print("done", flush=True)
"""


@contextmanager
def hungry_server() -> Iterator[tuple[subprocess.Popen[str], ServerProcesses]]:
    """Starts a process that allocates and frees the number of bytes of a line, and computes for 0.1 s at "burn"."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        found = processes_at(f"http://127.0.0.1:{int(process.stdout.readline())}")
        assert found is not None
        yield process, found


def send_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin and process.stdout
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


@pytest.mark.slow
def test_a_reset_starts_a_new_peak() -> None:
    with hungry_server() as (process, found):
        found.reset_peak()
        before = found.peak_bytes()
        send_line(process, str(100 * MIB))
        assert 99 * MIB < found.peak_bytes() - before < 110 * MIB
        found.reset_peak()
        assert found.peak_bytes() - before < 10 * MIB


@pytest.mark.slow
def test_the_cpu_time_between_two_readings_is_measured() -> None:
    with hungry_server() as (process, found):
        before_s = found.cpu_s()
        send_line(process, "burn")
        assert 0.05 < found.cpu_s() - before_s < 0.5


def test_a_server_that_has_ended_uses_nothing() -> None:
    with hungry_server() as (_, found):
        pass
    found.reset_peak()
    assert (found.peak_bytes(), found.cpu_s()) == (0, 0.0)


def test_a_process_that_ended_unnoticed_uses_nothing() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        found = ServerProcesses([psutil.Process(process.pid)])
        found.reset_peak()
        assert found.peak_bytes() <= 0


def test_remote_servers_and_unused_ports_have_no_processes() -> None:
    assert processes_at("http://192.0.2.1:80") is None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert processes_at(f"http://127.0.0.1:{port}") is None
