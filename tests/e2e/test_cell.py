"""Cells and servers with a role, as real processes: they connect to the right workers, and leave nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier

import httpx
import psutil
import pytest

from bench.servers.ports import free_port
from motet.deploy.child import ChildServer, read_figures
from motet.errors import StartupError
from motet.settings.server_config import environment
from motet.transfer.backends.shared_segment import PREFIX, segment_folders
from tests.e2e.long_answer import ENDLESS, events_of_long_answer, texts_of
from tests.e2e.processes import wait_until_gone
from tests.forked import HIDDEN_MODULES, ForkingProcess
from tests.hosts.servers import eventually
from tests.patience import PATIENCE_S
from tests.tiny_engine import TINY

pytestmark = pytest.mark.slow

CELL = ("--prefill", "1", "--decode", "1", "--bypass-tokens", "0")
BODY = {
    "prompt": "the hand in the sand and then the other hand",
    "n": 3,
    "max_tokens": 24,
    "seed": 7,
    "ignore_eos": True,
}


def start(forking: ForkingProcess, folder: Path, tmp_path: Path, *more: str, port: int = 0) -> ChildServer:
    """Makes a server whose temporary files are all in `tmp_path`."""
    environ = {**environment(), "TMPDIR": str(tmp_path)}
    return forking.server([str(folder), *TINY, *more], port=port, environ=environ)


def texts(server: ChildServer) -> list[str]:
    response = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


def workers(server: ChildServer) -> dict[str, dict[str, object]]:
    return {worker["id"]: worker for worker in httpx.get(f"{server.url}/status", timeout=PATIENCE_S).json()["workers"]}


def pids(server: ChildServer) -> list[int]:
    return [pid for worker in workers(server).values() if isinstance(pid := worker["pid"], int)]


def transfers(server: ChildServer) -> tuple[int, int]:
    """Returns the number of prefills and transfers of this server's own engines."""
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        figures = read_figures(client)
    return figures.prefills, figures.kv_transfers


def request_until_transferred(decode: ChildServer, expected: list[str], *, total_transfers: int) -> None:
    """Waits until the prefill server is connected, then sends requests until one of them is prefilled there. All
    answers must be correct."""
    deadline = time.monotonic() + PATIENCE_S
    while workers(decode)["prefill-0"]["state"] != "ready":
        assert time.monotonic() < deadline, "the decode server does not connect to its prefill server"
        time.sleep(0.05)
    while transfers(decode) != (0, total_transfers):
        assert time.monotonic() < deadline, "the decode server does not use its prefill server again"
        assert texts(decode) == expected


def wait_for_children(pid: int, count: int) -> list[int]:
    """Waits until the process has this number of children, and returns their pids."""
    deadline = time.monotonic() + PATIENCE_S
    while len(children := psutil.Process(pid).children()) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} has only {len(children)} children")
        time.sleep(0.01)
    return [child.pid for child in children]


@pytest.fixture(scope="module")
def expected(one_engine: Callable[[str], ChildServer]) -> list[str]:
    """The answer of one engine."""
    return texts(one_engine("float32"))


@pytest.mark.long
def test_a_signal_during_the_start_of_a_cell_ends_all_started_processes(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "motet", "serve", str(folder), *TINY, *CELL, "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**environment(), "TMPDIR": str(tmp_path)}
    ) as server:
        engines = wait_for_children(server.pid, 2)
        server.send_signal(signal.SIGTERM)
        output, _ = server.communicate(timeout=PATIENCE_S)
    assert (server.returncode, output) == (130, b"")
    for engine in engines:
        wait_until_gone(engine, PATIENCE_S)
    assert list(tmp_path.glob("motet-*")) == []


def test_a_cell_that_cannot_start_gives_its_reason_once_and_leaves_nothing(
    forking: ForkingProcess, folder: Path, tmp_path: Path
) -> None:
    with (
        pytest.raises(StartupError, match="exit code 5") as caught,
        start(forking, folder, tmp_path, *CELL, "--kv-cache-gb", "0.000001"),
    ):
        pass
    assert caught.value.message.count("motet: ") == 1
    assert "Traceback" not in caught.value.message
    assert list(tmp_path.glob("motet-*")) == []


@pytest.mark.long
def test_two_cells_on_one_machine_stay_separate_and_each_ends_without_the_other(
    forking: ForkingProcess,
    folder: Path,
    long_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    expected: list[str],
) -> None:
    folders = [
        tmp_path_factory.mktemp("t") for _ in range(2)
    ]  # short, since the path of a socket has at most 107 characters
    once = (*CELL, "--engine-restarts", "0")
    shared = (*CELL, "--kv-transfer-backend", "shared-memory")
    with start(forking, long_folder, folders[0], *once) as one, start(forking, folder, folders[1], *shared) as other:
        sides = [worker["transfer"] for cell in (one, other) for worker in workers(cell).values()]
        assert len({str(side) for side in sides}) == 4
        assert texts(one) == expected
        assert (transfers(one), transfers(other)) == ((1, 1), (0, 0))
        assert_one_prompt_was_transferred(one)
        assert texts(other) == expected
        assert (transfers(one), transfers(other)) == ((1, 1), (1, 1))

        killed = pids(other)
        os.kill(other.pid, signal.SIGKILL)
        for pid in killed:
            wait_until_gone(pid, PATIENCE_S)
        assert eventually(segment_files, lambda files: files == []) == [], "the engines have left shared memory"
        assert texts(one) == expected

        assert_it_works_without_prefill_and_ends_with_its_decode_engine(one, expected)
        assert list(folders[0].glob("motet-*")) == []


def test_streams_of_a_cell_that_is_stopped_end_or_get_an_error(
    forking: ForkingProcess, long_folder: Path, tmp_path: Path
) -> None:
    lengths = (200, 200, ENDLESS, ENDLESS)
    flags = (*CELL, "--kv-transfer-backend", "shared-memory", "--drain-timeout", "0.5")
    with start(forking, long_folder, tmp_path, *flags) as cell, ThreadPoolExecutor(len(lengths)) as pool:
        engines = pids(cell)
        all_stream = Barrier(len(lengths), lambda: os.kill(cell.pid, signal.SIGTERM), timeout=PATIENCE_S)
        read = partial(events_of_long_answer, cell, after_first=all_stream.wait)
        for length, events in zip(lengths, pool.map(lambda length: read(max_tokens=length), lengths), strict=True):
            assert events[-1] == "data: [DONE]"
            finished = sum('"finish_reason":"length"' in event for event in events)
            assert '"error"' in events[-2] or (finished == 3 and length < ENDLESS)
        assert cell.wait() == 0
        assert "Traceback" not in cell.log
    for engine in engines:
        wait_until_gone(engine, PATIENCE_S)
    assert eventually(segment_files, lambda files: files == []) == []
    assert list(tmp_path.glob("motet-*")) == []


def segment_files() -> list[Path]:
    """Returns the files through which engines share memory. A file has a name for an instant only."""
    return [path for folder in segment_folders() for path in folder.glob(PREFIX + "*")]


FAKE_NIXL = """
import sys
_bindings = sys.modules[__name__]
class nixlBackendError(Exception): ...
class nixlNotAllowedError(Exception): ...
class nixl_agent_config:
    def __init__(self, **settings): ...
class nixl_agent:
    def __init__(self, name, config):
        raise nixlBackendError("NIXL_ERR_BACKEND")
"""
NIXL_MODULES = "nixl nixl_cu13 motet.transfer.backends.nixl"


def test_a_cell_without_nixl_answers_like_one_engine_with_one_transfer(
    forking: ForkingProcess, folder: Path, expected: list[str]
) -> None:
    environ = {**environment(), HIDDEN_MODULES: NIXL_MODULES}
    with forking.server([str(folder), *TINY, *CELL], port=0, environ=environ) as server:
        assert_it_uses_shared_memory(server, expected)
        assert "NIXL is not installed" in server.log


@pytest.mark.long
def test_a_cell_whose_nixl_cannot_start_answers_like_one_engine_with_one_transfer(
    folder: Path, tmp_path: Path, expected: list[str]
) -> None:
    (tmp_path / "nixl.py").write_text(FAKE_NIXL)
    path = os.pathsep.join(filter(None, (str(tmp_path), environment().get("PYTHONPATH"))))
    with ChildServer([str(folder), *TINY, *CELL], port=0, environ={**environment(), "PYTHONPATH": path}) as server:
        assert_it_uses_shared_memory(server, expected)
        assert "NIXL cannot start: nixlBackendError('NIXL_ERR_BACKEND')" in server.log


def assert_it_uses_shared_memory(cell: ChildServer, expected: list[str]) -> None:
    assert texts(cell) == expected
    assert transfers(cell) == (1, 1)
    assert {worker["transfer_backend"] for worker in workers(cell).values()} == {"shared-memory"}


def assert_it_works_without_prefill_and_ends_with_its_decode_engine(cell: ChildServer, expected: list[str]) -> None:
    prefill, decode = pids(cell)
    os.kill(prefill, signal.SIGKILL)
    wait_until_gone(prefill, PATIENCE_S)
    assert texts(cell) == expected
    assert httpx.get(f"{cell.url}/health", timeout=PATIENCE_S).status_code == 200
    states = {"prefill-0": "dead", "decode-0": "ready"}
    assert eventually(
        lambda: {name: worker["state"] for name, worker in workers(cell).items()}, lambda reported: reported == states
    )
    with httpx.Client(base_url=cell.url, timeout=PATIENCE_S) as http:
        assert http.get("/health").status_code == 200  # connects, since the server ends soon after its engine
        events = events_of_long_answer(cell, (decode, signal.SIGKILL), max_tokens=ENDLESS)
        assert http.get("/health").status_code == 503
    assert '"engine_died"' in events[-2]
    assert events[-1] == "data: [DONE]"
    assert cell.wait() == 70


def assert_one_prompt_was_transferred(cell: ChildServer) -> None:
    """Checks the status, once the prefill engine has received the acknowledgement of decode."""
    reported = eventually(
        lambda: workers(cell),
        lambda reports: not any(worker["leases"] or worker["blocks_used"] for worker in reports.values()),
    )
    assert {name: (worker["role"], worker["state"]) for name, worker in reported.items()} == {
        "prefill-0": ("prefill", "ready"),
        "decode-0": ("decode", "ready"),
    }
    assert len(set(pids(cell))) == 2
    totals = httpx.get(f"{cell.url}/status", timeout=PATIENCE_S).json()["totals"]
    assert (totals["prefills"], totals["transfers"], totals["recomputed_tokens"]) == (1, 1, 1)
    assert totals["bypasses"] == 0


def test_a_decode_server_uses_a_prefill_server_and_finds_it_again_after_a_restart(
    forking: ForkingProcess, folder: Path, tmp_path: Path, expected: list[str]
) -> None:
    keys = ("--cluster-key", "cluster", "--worker-key", "secret")
    free = ("--side-channel-port", "0", *keys, "--no-prefix-cache")
    port = free_port()
    prefill_flags = ("--prefill-url", f"http://127.0.0.1:{port}", "--bypass-tokens", "0")
    with start(forking, folder, tmp_path, "--role", "decode", *prefill_flags, *free) as decode:
        assert texts(decode) == expected
        for times in (1, 2):
            with start(
                forking, folder, tmp_path, "--role", "prefill", "--api-key", "other", *free, port=port
            ) as prefill:
                request_until_transferred(decode, expected, total_transfers=times)
                reported = workers(decode)
                assert {name: worker["role"] for name, worker in reported.items()} == {
                    "decode-0": "decode",
                    "prefill-0": "prefill",
                }
                assert reported["prefill-0"]["address"] == prefill.url
        assert texts(decode) == expected
        assert transfers(decode) == (0, 2)
        assert_it_finishes_its_answer_after_sigterm(decode)


def assert_it_finishes_its_answer_after_sigterm(server: ChildServer) -> None:
    (engine,) = (pid for pid in pids(server))
    undisturbed = texts_of(events_of_long_answer(server))
    assert texts_of(events_of_long_answer(server, (server.pid, signal.SIGTERM))) == undisturbed
    assert server.wait() == 0
    wait_until_gone(engine, PATIENCE_S)


def test_a_taken_side_channel_port_is_an_error_that_names_the_flag(
    forking: ForkingProcess, folder: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(StartupError, match="exit code 2") as caught,
            start(forking, folder, tmp_path, "--role", "prefill", "--side-channel-port", str(port)),
        ):
            pass
    assert f"--side-channel-port {port}" in caught.value.message
    assert "Traceback" not in caught.value.message
    assert list(tmp_path.glob("motet-*")) == []
