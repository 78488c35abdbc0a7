"""A gateway in front of real servers that are killed or stopped while they generate: each text equals the text of one
server without faults."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from motet.deploy.child import ChildServer, read_figures
from motet.settings.server_config import environment
from tests.fault.answers import Answer
from tests.forked import ForkingProcess
from tests.hosts.servers import Streaming, eventually
from tests.patience import PATIENCE_S
from tests.tiny_engine import TINY

pytestmark = pytest.mark.slow

GATEWAY = ("--worker-timeout", "5")
BODY = {
    "prompt": "the hand in the sand and then the other hand",
    "n": 3,
    "max_tokens": 400,
    "seed": 7,
    "ignore_eos": True,
    "stream": True,
}


def child(forking: ForkingProcess, command: str, tmp_path: Path, *arguments: str) -> ChildServer:
    """Makes a server or gateway whose temporary files are all in `tmp_path`."""
    return forking.server(arguments, command=command, environ={**environment(), "TMPDIR": str(tmp_path)})


@contextmanager
def streaming(server: ChildServer) -> Iterator[Streaming]:
    with httpx.stream("POST", f"{server.url}/v1/completions", json=BODY, timeout=PATIENCE_S) as response:
        assert response.status_code == 200
        yield Streaming(response)


def status(gateway: ChildServer) -> dict[str, list[dict[str, object]]]:
    report: dict[str, list[dict[str, object]]] = httpx.get(f"{gateway.url}/status", timeout=PATIENCE_S).json()
    return report


def routed_to_cached_blocks(gateway: ChildServer) -> float:
    """Returns the number of prompt tokens that the gateway sent to a server known to have them cached."""
    lines = httpx.get(f"{gateway.url}/metrics", timeout=PATIENCE_S).text.splitlines()
    (line,) = [line for line in lines if line.startswith("motet:routing_overlap_tokens_total")]
    return float(line.split()[-1])


@pytest.fixture(scope="module")
def expected(one_engine: Callable[[str], ChildServer]) -> Answer:
    """The answer of one engine."""
    with streaming(one_engine("float32")) as alone:
        return alone.read_all()


def until_state(gateway: ChildServer, server: ChildServer, state: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (server.url, state) not in [(worker["address"], worker["state"]) for worker in status(gateway)["workers"]]:
        assert time.monotonic() < deadline, f"{server.url} does not become {state}: {status(gateway)}"
        time.sleep(0.05)


def test_a_text_is_the_same_when_a_server_stops_and_when_one_is_killed(
    folder: Path, tmp_path: Path, forking: ForkingProcess, expected: Answer
) -> None:
    with ExitStack() as stack:
        serve = (str(folder), *TINY, "--kv-events-port", "0")
        servers = [stack.enter_context(child(forking, "serve", tmp_path, *serve)) for _ in range(2)]
        workers = [part for server in servers for part in ("--worker", server.url)]
        own = tmp_path / "gateway"
        own.mkdir()
        gateway = stack.enter_context(child(forking, "gateway", own, *workers, *GATEWAY))

        with streaming(gateway) as answer:
            answer.read_some(choices=3)
            (stopped,) = [server for server in servers if answer.is_from(server.url)]
            os.kill(stopped.pid, signal.SIGSTOP)
            try:
                assert answer.read_all() == expected
                until_state(gateway, stopped, "silent")
            finally:
                os.kill(stopped.pid, signal.SIGCONT)
        until_state(gateway, stopped, "ready")

        with streaming(gateway) as answer:
            answer.read_some(choices=3)
            (killed,) = [server for server in servers if answer.is_from(server.url)]
            os.kill(killed.pid, signal.SIGKILL)
            assert answer.read_all() == expected
        until_state(gateway, killed, "dead")

        def routed() -> float:
            with streaming(gateway) as answer:
                assert answer.read_all() == expected
            return routed_to_cached_blocks(gateway)

        assert eventually(routed, lambda tokens: tokens > 0)  # the gateway reads the server's events at some time
        os.kill(gateway.pid, signal.SIGTERM)
        assert gateway.wait() == 0
        assert list(own.iterdir()) == []


def test_prefill_and_decode_servers_of_a_gateway_generate_the_text_of_one_server(
    folder: Path, tmp_path: Path, forking: ForkingProcess, expected: Answer
) -> None:
    separate = ("--side-channel-port", "0", "--cluster-key", "cluster")
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(child(forking, "serve", tmp_path, str(folder), *TINY, "--role", role, *separate))
            for role in ("prefill", "decode")
        )
        workers = ("--worker", f"{prefill.url},prefill", "--worker", f"{decode.url},decode")
        gateway = stack.enter_context(child(forking, "gateway", tmp_path, *workers, "--bypass-tokens", "0"))
        with streaming(gateway) as answer:
            assert answer.read_all() == expected
        with httpx.Client(base_url=decode.url, timeout=PATIENCE_S) as client:
            figures = read_figures(client)
        assert (figures.kv_transfers, figures.recomputed_tokens) == (1, 1)
        totals = httpx.get(f"{gateway.url}/status", timeout=PATIENCE_S).json()["totals"]
        assert (totals["transfers"], totals["bypasses"], totals["migrations"]) == (1, 0, 0)
