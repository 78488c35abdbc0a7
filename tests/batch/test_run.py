"""Runs of a batch with a scripted server: every line gets one result or one error, whatever happens."""

import asyncio
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from motet.batch.concurrency import FIRST_LIMIT
from motet.batch.lines import BatchLine
from motet.batch.run import MAX_BROKEN_ATTEMPTS, MAX_OPEN_BYTES
from motet.batch.sender import ServerReply, total_tokens
from motet.errors import BatchStoppedError, ModelLoadError
from tests.batch.batch_scene import BatchScene, ScriptedServer, echo, refusal, request, requests

pytestmark = pytest.mark.anyio

BROKEN = ServerReply(0, reason="connection reset")
UNREACHED = ServerReply(0, reason="connection refused", was_sent=False)


class HangingServer(ScriptedServer):
    """Never answers a request."""

    def __init__(self, on_request: Callable[[], None]) -> None:
        super().__init__()
        self._on_request = on_request

    async def send(self, line: BatchLine) -> ServerReply:
        self.sent.append(line.custom_id)
        self._on_request()
        await asyncio.Event().wait()
        raise AssertionError


async def test_every_line_gets_its_result(tmp_path: Path) -> None:
    scene = BatchScene(tmp_path, requests(20))
    server = await scene.run(concurrency=4)
    assert server.most_in_progress == 4
    assert scene.results().keys() == {f"id-{number}" for number in range(20)}
    assert scene.failures() == {}
    assert not scene.errors.exists()
    assert scene.progress.num_completed == 20
    assert scene.progress.num_tokens == 200


async def test_lines_that_are_no_requests_are_errors_and_the_others_complete(tmp_path: Path) -> None:
    lines = [
        b"\xef\xbb\xbf",
        request("a"),
        b"\r\n",
        b"nonsense\n",
        request("b").replace(b"\n", b"\r\n"),
        request("a", "another prompt"),
        request("c", url="/v1/embeddings"),
        request("d", body={"stream": True}),
        b"\0\0\n",
        request("e").rstrip(b"\n"),
    ]
    scene = BatchScene(tmp_path, b"".join(lines))
    await scene.run()
    assert scene.results().keys() == {"a", "b", "e"}
    assert scene.failures() == {
        None: "invalid_json_line",
        "a": "duplicate_custom_id",
        "c": "invalid_url",
        "d": "unsupported_value",
    }
    assert scene.errors.read_bytes().count(b"\n") == scene.progress.num_failed == 5
    assert b'"line":3}' in scene.errors.read_bytes()
    assert scene.progress.num_left == 0


async def test_refused_requests_are_in_the_file_of_errors_and_are_sent_at_the_next_start(tmp_path: Path) -> None:
    scene = BatchScene(tmp_path, requests(3))
    await scene.run(ScriptedServer(lambda line, n: refusal(400) if line.custom_id == "id-1" else echo(line, n)))
    assert scene.results().keys() == {"id-0", "id-2"}
    assert scene.failures() == {"id-1": 400}
    again = await scene.run()
    assert again.sent == ["id-1"]
    assert len(scene.results()) == 3
    assert not scene.errors.exists()


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (BROKEN, "no_response"),
        (refusal(500), 500),
        (refusal(503, "engine_died"), 503),
    ],
    ids=["broken", "500", "engine_died"],
)
async def test_a_request_that_breaks_the_server_fails_after_some_attempts(
    tmp_path: Path, reply: ServerReply, code: object
) -> None:
    scene = BatchScene(tmp_path, requests(3))
    server = await scene.run(ScriptedServer(lambda line, n: reply if line.custom_id == "id-1" else echo(line, n)))
    assert server.sent.count("id-1") == MAX_BROKEN_ATTEMPTS
    assert scene.results().keys() == {"id-0", "id-2"}
    assert scene.failures() == {"id-1": code}


@pytest.mark.parametrize("body", [b'{"a": [1]}', b"data: {}\n\n"])
async def test_a_success_that_is_not_json_is_an_error(tmp_path: Path, body: bytes) -> None:
    scene = BatchScene(tmp_path, requests(1))
    await scene.run(ScriptedServer(lambda line, n: ServerReply(200, body, is_json=False)))
    assert scene.failures() == {"id-0": "invalid_response"}


@pytest.mark.parametrize(
    "reply",
    [BROKEN, UNREACHED, refusal(429), refusal(503, "overloaded"), refusal(503, "no_worker"), refusal(502)],
    ids=lambda reply: reply.reason or f"{reply.status}",
)
async def test_a_failure_of_the_server_costs_only_time(tmp_path: Path, reply: ServerReply) -> None:
    scene = BatchScene(tmp_path, requests(10))
    server = await scene.run(ScriptedServer(lambda line, n: reply if n < MAX_BROKEN_ATTEMPTS else echo(line, n)))
    assert len(scene.results()) == 10
    assert len(server.sent) == 10 * MAX_BROKEN_ATTEMPTS
    assert scene.failures() == {}


async def test_a_refusal_is_sent_again_after_the_time_that_the_server_names(tmp_path: Path) -> None:
    scene = BatchScene(tmp_path, requests(1))
    start_s = scene.clock.now_s
    await scene.run(ScriptedServer(lambda line, n: refusal(429, retry_after_s=7) if n == 1 else echo(line, n)))
    assert scene.clock.now_s - start_s == 7


async def test_a_server_that_restarts_is_waited_for_without_counting_attempts(tmp_path: Path) -> None:
    scene = BatchScene(tmp_path, requests(5))
    server = ScriptedServer(
        lambda line, n: UNREACHED if n < 20 else echo(line, n),
        probe=lambda n: UNREACHED if n <= 10 else ServerReply(200),
    )
    await scene.run(server)
    assert len(scene.results()) == 5
    assert server.num_probes > 10


@pytest.mark.parametrize("reply", [UNREACHED, refusal(503, "overloaded")], ids=["away", "busy"])
async def test_a_server_that_never_answers_ends_the_run(tmp_path: Path, reply: ServerReply) -> None:
    scene = BatchScene(tmp_path, requests(8))
    start_s = scene.clock.now_s

    def answer(line: BatchLine, attempt: int) -> ServerReply:
        return echo(line, attempt) if line.custom_id == "id-0" else reply

    def probe(number: int) -> ServerReply:
        return UNREACHED if reply is UNREACHED and number > 1 else ServerReply(200)

    with pytest.raises(BatchStoppedError, match="for 30 s"):
        await scene.run(ScriptedServer(answer, probe=probe), server_timeout_s=30)
    assert scene.clock.now_s - start_s < 100
    assert scene.results().keys() == {"id-0"}
    await scene.run()
    assert len(scene.results()) == 8


async def test_a_request_that_alone_is_refused_fails(tmp_path: Path) -> None:
    scene = BatchScene(tmp_path, requests(50))
    server = ScriptedServer(lambda line, n: refusal(429) if line.custom_id == "id-1" else echo(line, n))
    await scene.run(server, server_timeout_s=0.0, concurrency=2)
    assert scene.failures() == {"id-1": 429}
    assert len(scene.results()) == 49


async def test_a_wrong_key_ends_the_run_before_the_first_request(tmp_path: Path) -> None:
    scene = BatchScene(tmp_path, requests(3))
    server = ScriptedServer(probe=lambda n: refusal(401))
    with pytest.raises(BatchStoppedError, match="API key"):
        await scene.run(server)
    assert server.sent == []


async def test_a_stopped_run_keeps_what_finishes_in_time(tmp_path: Path) -> None:
    scene, answered = BatchScene(tmp_path, requests(20)), count(1)

    def answer(line: BatchLine, attempt: int) -> ServerReply:
        if next(answered) == 6:
            scene.stop()
        return echo(line, attempt)

    server = await scene.run(ScriptedServer(answer), concurrency=3)
    assert 6 <= len(scene.results()) <= 9
    assert len(server.sent) == len(scene.results())
    again = await scene.run()
    assert len(again.sent) == 20 - len(server.sent)
    assert len(scene.results()) == 20


async def test_a_stopped_run_does_not_wait_for_a_server_that_is_away(tmp_path: Path) -> None:
    scene = BatchScene(tmp_path, requests(5))

    def probe(number: int) -> ServerReply:
        if number == 3:
            scene.stop()
        return UNREACHED

    server = await scene.run(ScriptedServer(probe=probe), server_timeout_s=10**9)
    assert server.sent == []


async def test_requests_that_hang_are_dropped_after_a_stop_and_sent_at_the_next_start(tmp_path: Path) -> None:
    scene = BatchScene(tmp_path, requests(5))
    server = HangingServer(scene.stop)
    await scene.run(server, stop_s=0.01)
    assert server.sent
    assert scene.results() == {}
    await scene.run()
    assert len(scene.results()) == 5


async def test_a_batch_without_requests_needs_no_server(tmp_path: Path) -> None:
    scene = BatchScene(tmp_path, b"\n" + request("a", url="/none"))
    server = await scene.run(ScriptedServer(probe=lambda n: UNREACHED))
    assert server.num_probes == 0
    assert scene.failures() == {"a": "invalid_url"}


async def test_a_server_that_cannot_start_again_ends_the_run_with_its_error(tmp_path: Path) -> None:
    async def revive() -> None:
        raise ModelLoadError("the file is gone")

    with pytest.raises(ModelLoadError, match="the file is gone"):
        await BatchScene(tmp_path, requests(3)).run(revive=revive)


@pytest.mark.parametrize(("code", "is_lower"), [("no_worker", False), ("overloaded", True)])
async def test_only_a_server_with_too_many_requests_lowers_the_limit(tmp_path: Path, code: str, is_lower: bool) -> None:
    scene = BatchScene(tmp_path, requests(60))
    server = ScriptedServer(lambda line, n: refusal(503, code) if n == 1 else echo(line, n))
    await scene.run(server, concurrency=None)
    assert (scene.progress.limit < FIRST_LIMIT) is is_lower
    assert len(scene.results()) == 60


@pytest.mark.slow
async def test_large_requests_are_sent_one_after_the_other(tmp_path: Path) -> None:
    large = MAX_OPEN_BYTES * 3 // 4
    lines = b"".join(request(f"{number}", "x" * large) for number in range(4))
    scene = BatchScene(tmp_path, lines)
    server = await scene.run(ScriptedServer(lambda line, n: ServerReply(200, b"{}")), concurrency=4)
    assert server.most_in_progress == 2
    assert len(scene.results()) == 4


@pytest.mark.parametrize("count", ["-1", "1" + "0" * 400, "1" + "0" * 5000, "null", '"1"'])
def test_a_number_of_tokens_that_cannot_be_right_is_ignored(count: str) -> None:
    assert total_tokens(f'{{"usage":{{"total_tokens":{count}}}}}'.encode()) == 0
