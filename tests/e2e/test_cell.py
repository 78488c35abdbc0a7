"""Cells and servers with a role, as real processes: they find whom they should, and leave nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from motet.config import environment
from motet.deploy.child import ChildServer
from motet.deploy.figures import read_figures
from motet.errors import StartupError
from tests.e2e.processes import wait_until_gone

pytestmark = pytest.mark.slow

ARGUMENTS = ("--served-model-name", "tiny", "--kv-cache-gb", "0.05", "--threads", "1", "--dtype", "float32")
CELL = ("--prefill", "1", "--decode", "1", "--bypass-tokens", "0")
BODY = {
    "prompt": "the hand in the sand and then the other hand",
    "n": 3,
    "max_tokens": 24,
    "seed": 7,
    "ignore_eos": True,
}
GONE_TIMEOUT_S = 20.0


def start(model: Path, tmp_path: Path, *more: str, port: int = 0) -> ChildServer:
    """A server whose temporary files are all in `tmp_path`."""
    return ChildServer([str(model), *ARGUMENTS, *more], port=port, environ={**environment(), "TMPDIR": str(tmp_path)})


def texts(server: ChildServer) -> list[str]:
    response = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60)
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


def workers(server: ChildServer) -> dict[str, dict[str, object]]:
    return {worker["id"]: worker for worker in httpx.get(f"{server.url}/status").json()["workers"]}


def pids(server: ChildServer) -> list[int]:
    return [pid for worker in workers(server).values() if isinstance(pid := worker["pid"], int)]


def transfers(server: ChildServer) -> tuple[int, int]:
    """Prefills and transfers that this server's own engines have made."""
    with httpx.Client(base_url=server.url) as client:
        figures = read_figures(client)
    return figures.prefills, figures.kv_transfers


def ask_until_prefilled_apart(decode: ChildServer, expected: list[str], *, transfers_in_all: int) -> None:
    """Every answer is the expected one, and within seconds one of them is prefilled apart again."""
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while transfers(decode) != (0, transfers_in_all):
        assert time.monotonic() < deadline, "the decode server does not go back to its prefill server"
        assert texts(decode) == expected


def wait_for_children(pid: int, count: int) -> list[int]:
    """Their pids, once there are so many."""
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while len(children := psutil.Process(pid).children()) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} has only {len(children)} children")
        time.sleep(0.01)
    return [child.pid for child in children]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one engine answers."""
    with start(model, tmp_path_factory.mktemp("single")) as server:
        return texts(server)


@pytest.fixture
def cell(model: Path, tmp_path: Path) -> Iterator[ChildServer]:
    with start(model, tmp_path, *CELL) as running:
        yield running


def test_the_status_shows_the_workers_and_what_they_did(cell: ChildServer) -> None:
    texts(cell)
    shown = workers(cell)
    assert {name: (worker["role"], worker["state"]) for name, worker in shown.items()} == {
        "prefill-0": ("prefill", "ready"),
        "decode-0": ("decode", "ready"),
    }
    assert len(set(pids(cell))) == 2
    assert [worker["leases"] for worker in shown.values()] == [0, 0]
    assert [worker["blocks_used"] for worker in shown.values()] == [0, 0]
    totals = httpx.get(f"{cell.url}/status").json()["totals"]
    assert (totals["prefills"], totals["transfers"], totals["recomputed_tokens"]) == (1, 1, 1)
    assert totals["bypasses"] == 0


def test_a_signal_ends_a_cell_and_leaves_nothing(model: Path, tmp_path: Path, expected: list[str]) -> None:
    with start(model, tmp_path, *CELL) as cell:
        assert texts(cell) == expected
        engines = pids(cell)
        os.kill(cell.pid, signal.SIGTERM)
        assert cell.wait() == 0
        for pid in engines:
            wait_until_gone(pid, GONE_TIMEOUT_S)
    assert list(tmp_path.glob("motet-*")) == []


def test_a_signal_during_the_start_of_a_cell_ends_what_has_been_started(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "motet", "serve", str(model), *ARGUMENTS, *CELL, "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**environment(), "TMPDIR": str(tmp_path)}
    ) as server:
        engines = wait_for_children(server.pid, 2)
        server.send_signal(signal.SIGTERM)
        output, _ = server.communicate(timeout=GONE_TIMEOUT_S)
    assert (server.returncode, output) == (130, b"")
    for engine in engines:
        wait_until_gone(engine, GONE_TIMEOUT_S)
    assert list(tmp_path.glob("motet-*")) == []


def test_a_cell_that_cannot_start_says_why_once_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(StartupError, match="exit code 5") as caught,
        start(model, tmp_path, *CELL, "--kv-cache-gb", "0.000001"),
    ):
        pass
    assert caught.value.message.count("motet: ") == 1
    assert "Traceback" not in caught.value.message
    assert list(tmp_path.glob("motet-*")) == []


def test_a_killed_cell_takes_its_engines_along(cell: ChildServer) -> None:
    engines = pids(cell)
    os.kill(cell.pid, signal.SIGKILL)
    for pid in engines:
        wait_until_gone(pid, GONE_TIMEOUT_S)


def test_without_its_prefill_engine_a_cell_answers_the_same(cell: ChildServer, expected: list[str]) -> None:
    prefill = workers(cell)["prefill-0"]["pid"]
    assert isinstance(prefill, int)
    os.kill(prefill, signal.SIGKILL)
    wait_until_gone(prefill, GONE_TIMEOUT_S)
    assert texts(cell) == expected
    assert httpx.get(f"{cell.url}/health").status_code == 200
    assert workers(cell)["prefill-0"]["state"] == "dead"


def test_without_restarts_a_cell_ends_with_its_last_decode_engine(model: Path, tmp_path: Path) -> None:
    with start(model, tmp_path, *CELL, "--engine-restarts", "0") as cell:
        decode = workers(cell)["decode-0"]["pid"]
        assert isinstance(decode, int)
        os.kill(decode, signal.SIGKILL)
        assert cell.wait() == 70
        assert list(tmp_path.glob("motet-*")) == []


def test_two_cells_on_one_machine_do_not_meet(model: Path, tmp_path: Path, expected: list[str]) -> None:
    with start(model, tmp_path, *CELL) as one, start(model, tmp_path, *CELL) as other:
        sides = [worker["transfer"] for cell in (one, other) for worker in workers(cell).values()]
        assert len({str(side) for side in sides}) == 4
        assert texts(one) == expected
        assert (transfers(one), transfers(other)) == ((1, 1), (0, 0))
        assert texts(other) == expected
        assert (transfers(one), transfers(other)) == ((1, 1), (1, 1))


def test_a_decode_server_asks_a_prefill_server_and_answers_the_same(
    model: Path, tmp_path: Path, expected: list[str]
) -> None:
    free = ("--side-channel-port", "0", "--cluster-key", "ours")
    with (
        start(model, tmp_path, "--role", "prefill", "--api-key", "secret", *free) as prefill,
        start(
            model, tmp_path, "--role", "decode", "--prefill-url", prefill.url, "--prefill-api-key", "secret",
            "--bypass-tokens", "0", *free,
        ) as decode,
    ):  # fmt: skip
        assert texts(decode) == expected
        assert transfers(decode) == (0, 1)
        shown = workers(decode)
        assert {name: worker["role"] for name, worker in shown.items()} == {
            "decode-0": "decode",
            "prefill-0": "prefill",
        }
        assert shown["prefill-0"]["address"] == prefill.url


def test_a_prefill_server_that_comes_back_is_met_again(model: Path, tmp_path: Path, expected: list[str]) -> None:
    free = ("--side-channel-port", "0", "--cluster-key", "ours", "--no-prefix-cache")
    port = free_port()
    asks = ("--role", "decode", "--prefill-url", f"http://127.0.0.1:{port}", "--bypass-tokens", "0")
    with start(model, tmp_path, *asks, *free) as decode:
        assert texts(decode) == expected
        for times in (1, 2):
            with start(model, tmp_path, "--role", "prefill", *free, port=port):
                ask_until_prefilled_apart(decode, expected, transfers_in_all=times)
        assert texts(decode) == expected
        assert transfers(decode) == (0, 2)


def test_a_taken_side_channel_port_is_an_error_that_names_the_flag(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(StartupError, match="exit code 2") as caught,
            start(model, tmp_path, "--role", "prefill", "--side-channel-port", str(port)),
        ):
            pass
    assert f"--side-channel-port {port}" in caught.value.message
    assert "Traceback" not in caught.value.message
    assert list(tmp_path.glob("motet-*")) == []
