"""Real servers with `--otlp-endpoint`, and the spans that a collector receives: a tree for each request."""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from motet.deploy.child import STOP_TIMEOUT_S, ChildServer
from tests.e2e.processes import wait_until_gone
from tests.forked import ForkingProcess
from tests.patience import PATIENCE_S
from tests.tiny_engine import TINY
from tests.tracing.collector import Collector, ReceivedSpan

pytestmark = pytest.mark.slow

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "the hand in the sand"}],
    "n": 8,
    "seed": 7,
    "max_tokens": 12,
    "ignore_eos": True,
    "stream": True,
}
LONG = 2000
"""Number of tokens of an answer, with the model of `long_folder`, that does not end before its engine is killed."""
HAS_TEXT = re.compile(r'"content":"[^"]').search
"""Matches a line of a stream with text. Before it, each choice has a line with its role and an empty text."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


def traced(forking: ForkingProcess, folder: Path, endpoint: str, *more: str, command: str = "serve") -> ChildServer:
    model = [str(folder), *TINY] if command == "serve" else []
    return forking.server([*model, "--otlp-endpoint", endpoint, *more], command=command)


def children_of(spans: Sequence[ReceivedSpan], group: ReceivedSpan) -> list[str]:
    """Returns the names of a span's children, by start time."""
    return [one.name for one in sorted(spans, key=lambda one: one.start_ns) if one.parent_id == group.span_id]


def named(spans: Sequence[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    return [one for one in spans if one.name == name]


def complete(count: int) -> Any:
    """Returns a predicate that is true when the spans of `count` requests have been received: a request's own span is
    the last one."""
    return lambda spans: sum(one.kind == 2 for one in spans) >= count and not missing(spans)


def missing(spans: Sequence[ReceivedSpan]) -> set[str]:
    """Returns the ids of parents that have not been received."""
    return {one.parent_id for one in spans} - {one.span_id for one in spans} - {"", SPAN}


def read(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> str:
    response = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    return response.text


def test_a_chat_of_eight_on_a_cell_is_one_tree(folder: Path, forking: ForkingProcess, collector: Collector) -> None:
    cell = ("--prefill", "1", "--decode", "1", "--bypass-tokens", "0")
    with traced(forking, folder, collector.url, *cell) as server:
        read(server.url, CHAT, SENT)
        spans = collector.until(complete(1))
    assert collector.paths == {"/v1/traces"}
    assert {one.trace_id for one in spans} == {TRACE} and {one.state for one in spans} == {"vendor=1"}
    (request,) = named(spans, "POST /v1/chat/completions")
    assert request.parent_id == SPAN
    assert request.attributes["http.response.status_code"] == 200
    assert request.service["service.name"] == "motet"
    (group,) = named(spans, "chat tiny")
    assert children_of(spans, request) == ["chat tiny"]
    assert [one for one in children_of(spans, group) if one != "choice"] == ["queue", "prefill", "decode"]
    attributes = group.attributes
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.choice.count"] == 8
    assert attributes["gen_ai.usage.output_tokens"] == 8 * 12
    assert attributes["gen_ai.response.finish_reasons"] == ["length"] * 8
    assert attributes["gen_ai.response.id"].startswith("chatcmpl-")
    choices = sorted(named(spans, "choice"), key=lambda one: int(one.attributes["motet.choice.index"]))
    assert [one.attributes["motet.choice.index"] for one in choices] == [*range(8)]
    for choice in choices:
        assert choice.parent_id == group.span_id
        assert choice.attributes["motet.choice.output_tokens"] == 12
        assert choice.start_ns <= choice.events["first_token"] <= choice.end_ns <= group.end_ns
    (prefill,), (decode,), (transfer,) = (named(spans, name) for name in ("prefill", "decode", "transfer"))
    assert (prefill.attributes["motet.worker"], decode.attributes["motet.worker"]) == ("prefill-0", "decode-0")
    assert transfer.parent_id == decode.span_id
    assert transfer.attributes["motet.transfer.bytes"] > 0
    assert prefill.end_ns <= transfer.start_ns < transfer.end_ns <= decode.events["first_delta"]
    assert not [one for one in spans if "sand" in json.dumps(one.attributes)]


def test_a_group_that_moves_has_a_span_with_cause_and_worker(
    long_folder: Path, forking: ForkingProcess, collector: Collector
) -> None:
    with traced(forking, long_folder, collector.url, "--decode", "2") as server:
        workers = httpx.get(f"{server.url}/status", timeout=PATIENCE_S).json()["workers"]
        pids = {worker["id"]: worker["pid"] for worker in workers}
        body = CHAT | {"max_tokens": LONG, "n": 2}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S) as response:
            lines = response.iter_lines()
            next(filter(HAS_TEXT, lines))
            left = response.headers["x-motet-worker"]
            os.kill(pids[left], signal.SIGKILL)
            assert "data: [DONE]" in list(lines)
        spans = collector.until(complete(1))
    (group,) = named(spans, "chat tiny")
    assert [one for one in children_of(spans, group) if one != "choice"] == ["queue", "decode", "move", "decode"]
    first, second = sorted(named(spans, "decode"), key=lambda one: one.start_ns)
    (move,) = named(spans, "move")
    assert first.error and not second.error
    assert move.attributes["motet.move.cause"] == "died"
    assert (move.attributes["motet.move.from"], move.attributes["motet.move.to"]) == (
        left,
        second.attributes["motet.worker"],
    )
    assert first.end_ns <= move.start_ns <= second.start_ns <= move.end_ns
    assert group.attributes["gen_ai.usage.output_tokens"] == 2 * LONG


def test_a_gateway_and_its_workers_make_one_trace(folder: Path, forking: ForkingProcess, collector: Collector) -> None:
    with (
        traced(forking, folder, collector.url) as worker,
        traced(forking, folder, collector.url, "--worker", worker.url, command="gateway") as gateway,
    ):
        read(gateway.url, CHAT, SENT)
        spans = collector.until(complete(2))
        assert {one.trace_id for one in spans} == {TRACE}
        servers = {one.service["service.instance.id"] for one in spans}
        assert servers == {url.removeprefix("http://") for url in (worker.url, gateway.url)}
        (received,) = named(spans, "POST /engine/generate")
        (sent,) = [one for one in named(spans, "decode") if one.span_id == received.parent_id]
        assert sent.kind == 3  # the kind of a client's span
        (local,) = [one for one in named(spans, "decode") if one is not sent]
        (group,) = named(spans, "text_completion tiny")
        assert (group.parent_id, local.parent_id) == (received.span_id, group.span_id)

        unsampled = SENT | {"traceparent": f"00-{'1' * 32}-{SPAN}-00"}
        read(gateway.url, CHAT, unsampled)
        read(gateway.url, CHAT)  # a trace of its own
        spans = collector.until(complete(4))
        assert "1" * 32 not in {one.trace_id for one in spans}
        assert len({one.trace_id for one in spans}) == 2


def test_a_refused_request_and_one_whose_client_leaves_end_their_spans(
    long_folder: Path, forking: ForkingProcess, collector: Collector
) -> None:
    with traced(forking, long_folder, collector.url) as server:
        refused = httpx.post(
            f"{server.url}/v1/chat/completions", json=CHAT | {"top_p": 2}, headers=SENT, timeout=PATIENCE_S
        )
        assert refused.status_code == 400
        body = CHAT | {"max_tokens": LONG}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S) as response:
            next(filter(HAS_TEXT, response.iter_lines()))
        spans = collector.until(complete(2))
    mistake, left = sorted(named(spans, "POST /v1/chat/completions"), key=lambda one: one.start_ns)
    assert (mistake.trace_id, children_of(spans, mistake), mistake.error) == (TRACE, [], "")
    assert mistake.attributes["http.response.status_code"] == 400 and mistake.attributes["motet.error.code"]
    (group,) = named(spans, "chat tiny")
    assert (group.parent_id, group.attributes["motet.status"], group.error) == (left.span_id, 499, "")
    choices = named(spans, "choice")
    assert 1 <= len(choices) <= 8  # the others had no text so far
    for choice in choices:
        assert choice.attributes["motet.choice.output_tokens"] > 0
        assert "gen_ai.response.finish_reasons" not in choice.attributes
        assert choice.events["first_token"] <= choice.end_ns


@pytest.mark.parametrize("silent", [False, pytest.param(True, marks=pytest.mark.long)], ids=["refusing", "silent"])
def test_a_server_works_and_ends_without_its_collector(folder: Path, forking: ForkingProcess, silent: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        if not silent:
            listener.close()
        with traced(forking, folder, url) as server:
            for _ in range(3):
                assert read(server.url, CHAT).endswith("data: [DONE]\n\n")
            pid, started_s = server.pid, time.monotonic()
        wait_until_gone(pid, PATIENCE_S)
    assert time.monotonic() - started_s < STOP_TIMEOUT_S
