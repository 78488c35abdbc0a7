"""Real vLLM servers are killed while they work: clients get complete answers or a clear error."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from bench.servers.vllm import MODEL_NAME
from tests.fault.answers import Body, Reader
from tests.real.answers import check, request, streaming
from tests.real.test_vllm import LONG, ROUTES
from tests.real.vllm_servers import SUSPECT, RealVLLM, gateway, real_vllm, until

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(400)]

VERY_LONG = " ".join([LONG] * 5)
IN_CHUNKS = ("--max-num-batched-tokens", "256")
DONE = "vllm:request_success_total"
MIGRATION_WAIT_S = 2
LEASE_S = 30
"""Time in seconds after which vLLM releases a ticket that was not read. It is vLLM's own setting."""
BODY: Body = {
    "model": MODEL_NAME,
    "prompt": LONG,
    "n": 3,
    "temperature": 0,
    "max_tokens": 60,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture(scope="module")
def pair(vllm_folder: Path, weights: Path) -> Iterator[tuple[RealVLLM, RealVLLM]]:
    """A prefill and a decode server. They compute prompts in chunks, so that a test can observe an unfinished
    prefill."""
    with ExitStack() as stack:
        both = [stack.enter_context(real_vllm(vllm_folder, weights, core, *IN_CHUNKS)) for core in (0, 1)]
        for one in both:
            one.server.wait_until_ready()
        yield both[0], both[1]


@pytest.fixture
def another(vllm_folder: Path, weights: Path) -> Iterator[RealVLLM]:
    """A server on the core of the killed server."""
    with real_vllm(vllm_folder, weights, 0) as server:
        server.server.wait_until_ready()
        yield server


def test_a_ticket_is_released_when_its_client_leaves_while_decode_hangs(
    pair: tuple[RealVLLM, RealVLLM], weights: Path, tmp_path: Path
) -> None:
    """The servers are connected by an earlier transfer: during its first one, a vLLM server only connects, and reports
    nothing until it has other work."""
    prefill, decode = pair
    workers = ("--worker", f"{prefill.url},prefill", "--worker", f"{decode.url},decode")
    with gateway(weights, tmp_path, *workers) as server:
        check(request(server.url, ROUTES[0], {**BODY, "max_tokens": 1}), n=3, tokens=1)
        until(lambda: prefill.holds_nothing, "the ticket that was used is still held")
        prefilled = prefill.metric(DONE)
        with decode.stopped():
            with sent(server.url, {**BODY, "prompt": f"Another one. {LONG}"}):
                until(lambda: prefill.metric(DONE) > prefilled, "nothing was prefilled")
                assert not prefill.holds_nothing
            left_s = time.monotonic()
        until(lambda: prefill.holds_nothing, "the ticket is not released")
        assert time.monotonic() - left_s < LEASE_S / 2


def test_a_prompt_is_computed_by_decode_when_its_prefill_server_is_killed(
    pair: tuple[RealVLLM, RealVLLM], weights: Path, tmp_path: Path
) -> None:
    prefill, decode = pair
    body = {**BODY, "prompt": VERY_LONG, "max_tokens": 8}
    with gateway(weights, tmp_path, "--worker", f"{prefill.url},prefill", "--worker", f"{decode.url},decode") as server:
        with ThreadPoolExecutor(max_workers=1) as threads:
            answering = threads.submit(request, server.url, ROUTES[0], body)
            until(lambda: prefill.metric("vllm:num_requests_running") > 0, "nothing is prefilled")
            prefill.kill()
            answer = answering.result()
        check(answer, n=3, tokens=8)
        assert request(server.url, ROUTES[0], body).texts == answer.texts
    until(lambda: decode.holds_nothing, "decode still holds blocks")
    assert SUSPECT not in decode.log


def test_an_answer_continues_on_another_server_or_fails_if_there_is_none(
    pair: tuple[RealVLLM, RealVLLM], another: RealVLLM, weights: Path, tmp_path: Path
) -> None:
    servers = [another, pair[1]]
    workers = [part for one in servers for part in ("--worker", one.url)]
    with gateway(weights, tmp_path, *workers, "--migration-wait", str(MIGRATION_WAIT_S)) as server:
        undisturbed = request(server.url, ROUTES[0], BODY)
        check(undisturbed, n=3, tokens=60)
        reader, killed = interrupted(server.url, servers)
        moved = reader.complete()
        check(moved, n=3, tokens=60)
        assert len(set(moved.texts)) == 1
        assert moved.texts[0][:40] == undisturbed.texts[0][:40], "text that was sent before the move is unchanged"

        (survivor,) = [one for one in servers if one is not killed]
        started_s = time.monotonic()
        cut, _ = interrupted(server.url, [survivor])
        assert cut.failure is not None and cut.failure.type == "server_error"
        assert time.monotonic() - started_s < 30
        assert SUSPECT not in survivor.log


@contextmanager
def sent(url: str, body: Body) -> Iterator[None]:
    """Sends a request, whose client disconnects at the end of the context without reading."""
    address, content = httpx.URL(url), json.dumps(body).encode()
    head = f"POST {ROUTES[0]} HTTP/1.1\r\nhost: {address.host}\r\ncontent-type: application/json\r\n"
    with socket.create_connection((address.host, address.port or 80)) as connection:
        connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        yield


def interrupted(url: str, servers: list[RealVLLM]) -> tuple[Reader, RealVLLM]:
    """Kills the server of an answer when each choice has some tokens. Returns the reader at the end, and that
    server."""
    with streaming(url, ROUTES[0], BODY) as stream:
        reader = stream.reader
        while len(reader.answer.choices) < 3 or min(map(len, reader.answer.texts)) < 40:
            reader.line(next(stream.lines))
        (generating,) = [one for one in servers if one.metric("vllm:num_requests_running") > 0]
        generating.kill()
        for line in stream.lines:
            reader.line(line)
    return reader, generating
