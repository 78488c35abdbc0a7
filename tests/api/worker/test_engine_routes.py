"""`/engine` over raw HTTP: what a gateway may send to a worker, what it gets, and what is refused."""

import asyncio
import logging
from functools import partial
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from motet.api.worker.engine_routes import PATIENCE_S
from motet.deploy.discover import load_files, read_files
from motet.engine import WorkerState
from motet.engine_orders import Connect
from motet.engines.wire import PROTOCOL, PROTOCOL_HEADER, CarriedError, EngineReport, FrameReader, StopChoice
from motet.errors import EngineDiedError, EngineError
from motet.ids import RequestId
from motet.metrics.stats import EngineStats
from motet.text.template import ChatTemplate
from motet.text.tokenizer import Tokenizer
from motet.transfer.ticket import Ticket, TransferAddress
from motet.types import GenerateRequest, GroupDelta, Role, choice_starts
from tests.api.engine_requests import HEADERS, group, post
from tests.api.serving import Served, Serving, WatchedEngine, group_lines
from tests.error_response import assert_error
from tests.tiny_tokenizer import save_tiny_tokenizer

pytestmark = pytest.mark.anyio


async def test_a_group_is_answered_in_frames_and_counted_as_any(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="motet.api"):
        response = await post(served, "/engine/generate", group())
    assert response.status_code == 200
    deltas = [delta for delta in FrameReader().feed(response.content) if isinstance(delta, GroupDelta)]
    assert len(deltas) == 4  # hello, a space, a digit, the end
    (line,) = group_lines(caplog)
    assert (line["request_id"], line["group"], line["status"]) == ("trace-g", "g", 200)
    assert (line["model"], line["adapter"], line["worker"]) == ("tiny", None, "engine-0")
    assert (line["n"], line["finished"], line["prompt_tokens"]) == (2, 2, 3)
    assert line["completion_tokens"] == sum(len(choice.token_ids) for delta in deltas for choice in delta.choices)
    metrics = await served.metrics()
    assert 'motet:groups_total{model_name="tiny",status="200"} 1.0' in metrics
    assert 'handler="/engine/generate",method="POST",status="200"} 1.0' in metrics


async def test_deltas_that_are_ready_are_sent_at_once(served: Served) -> None:
    async with served.http.stream(
        "POST", "/engine/generate", content=msgspec.msgpack.encode(group()), headers=HEADERS
    ) as response:
        parts = [part async for part in response.aiter_raw()]
    assert len(parts) == 1
    assert len(FrameReader().feed(parts[0])) == 4


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [(EngineDiedError("gone"), "EngineDiedError", 503), (EngineError("x"), "EngineError", 500)],
)
async def test_an_error_is_the_last_frame_and_counts_with_its_status(
    serve: Serving, error: EngineError, kind: str, status: int
) -> None:
    served = await serve(engine=WatchedEngine(fail_after={1: error}))
    response = await post(served, "/engine/generate", group())
    assert response.status_code == 200
    _, last = FrameReader().feed(response.content)
    assert last == CarriedError(kind, error.message, code=error.code)
    assert f'status="{status}"}} 1.0' in await served.metrics()


async def test_a_bug_in_the_engine_is_reported_without_its_text(
    serve: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(WatchedEngine):
        def generate(self, request: GenerateRequest) -> "NoGroup":  # type: ignore[override]
            return NoGroup()

    class NoGroup:
        def __aiter__(self) -> "NoGroup":
            return self

        async def __anext__(self) -> GroupDelta:
            raise ZeroDivisionError("secret")

        async def aclose(self) -> None: ...

    served = await serve(engine=Broken())
    response = await post(served, "/engine/generate", group())
    (last,) = FrameReader().feed(response.content)
    assert isinstance(last, CarriedError)
    assert (last.kind, "secret" in last.message) == ("EngineError", False)
    assert "secret" in caplog.text


async def test_a_group_from_a_gateway_passes_the_queue_of_clients_groups(serve: Serving) -> None:
    """The gateway has already queued the group, and will move it."""
    queued, placed = WatchedEngine(), WatchedEngine()
    served = await serve(engine=queued, placed=placed)
    assert (await post(served, "/engine/generate", group())).status_code == 200
    assert (len(queued.requests), len(placed.requests)) == (0, 1)
    await served.complete()
    assert (len(queued.requests), len(placed.requests)) == (1, 1)
    placed.check()


async def test_a_group_that_is_open_is_not_opened_twice(serve: Serving) -> None:
    """A gateway can send a group again to a worker that has not noticed the end of the first attempt."""
    served = await serve(engine=WatchedEngine(gated=True))
    first = await served.engine.start_request(post(served, "/engine/generate", group()))
    assert_error(await post(served, "/engine/generate", group()), status=503, code="overloaded")
    served.engine.go(9)
    assert (await first).status_code == 200
    served.engine.go(9)
    assert (await post(served, "/engine/generate", group())).status_code == 200


@pytest.mark.parametrize("steps", [0, 1])
async def test_a_gateway_that_disconnects_leaves_nothing_and_counts_as_499(serve: Serving, steps: int) -> None:
    served = await serve(engine=WatchedEngine(gated=True))
    request = await served.engine.start_request(post(served, "/engine/generate", group()))
    for _ in range(steps):
        served.engine.steps.release()
    await served.abandon(request)
    assert 'motet:groups_total{model_name="tiny",status="499"} 1.0' in await served.metrics()


async def test_a_caller_that_leaves_before_its_body_is_sent_opens_nothing(served: Served) -> None:
    await served.break_off("/engine/generate", f"{PROTOCOL_HEADER}: {PROTOCOL}\r\n")
    assert served.engine.requests == []


async def test_a_prefill_makes_one_ticket_whatever_n_is(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(role=Role.PREFILL))
    response = await post(served, "/engine/prefill?readers=2", group(choices=choice_starts(64, 0)))
    ticket = msgspec.msgpack.decode(response.content, type=Ticket)
    assert list(served.engine.leases.held.values()) == [ticket]
    assert (ticket.readers, ticket.num_tokens) == (2, 2)
    (prefill,) = served.engine.prefills
    assert (prefill.prompt, len(prefill.choices), prefill.trace) == ((5, 6, 7), 1, "trace-g")
    assert (await post(served, "/engine/release", ticket)).status_code == 204
    assert served.engine.released == [ticket]


@pytest.mark.parametrize("readers", ["0", "65", "x"])
async def test_an_impossible_number_of_readers_is_refused(serve: Serving, readers: str) -> None:
    served = await serve(engine=WatchedEngine(role=Role.PREFILL))
    assert_error(await post(served, f"/engine/prefill?readers={readers}", group()), status=400, param="readers")


async def test_a_prompt_of_one_token_and_a_worker_of_another_role_prefill_nothing(
    serve: Serving, served: Served
) -> None:
    prefill = await serve(engine=WatchedEngine(role=Role.PREFILL))
    assert (await post(prefill, "/engine/prefill", group(prompt=(5,)))).json()["error"]["param"] == "prompt"
    assert (await post(served, "/engine/prefill", group())).json()["error"]["code"] == "wrong_role"
    assert served.engine.prefills == prefill.engine.prefills == []


async def report(served: Served) -> EngineReport:
    response = await served.http.get("/engine")
    assert response.status_code == 200
    return msgspec.msgpack.decode(response.content, type=EngineReport)


async def test_an_engine_that_hangs_is_silent_and_one_that_died_is_dead(serve: Serving) -> None:
    class Sick(WatchedEngine):
        hangs = True

        async def stats(self) -> EngineStats:
            if self.hangs:
                await asyncio.Event().wait()
            raise EngineDiedError("gone")

    engine = Sick()
    served = await serve(engine=engine)
    began = asyncio.get_running_loop().time()
    silent = await report(served)
    assert (silent.state, silent.stats) == (WorkerState.SILENT, None)
    assert asyncio.get_running_loop().time() - began >= PATIENCE_S
    engine.hangs = False
    assert (await report(served)).state is WorkerState.DEAD


async def test_an_engine_with_a_side_channel_reports_its_own_id(serve: Serving) -> None:
    engine = WatchedEngine(role=Role.DECODE)
    engine.info = replace(engine.info, transfer=TransferAddress("decode-7", "127.0.0.1", 9))
    assert (await report(await serve(engine=engine))).engine_id == "decode-7"


async def test_stopping_ends_a_choice(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(gated=True))
    request = await served.engine.start_request(post(served, "/engine/generate", group()))
    response = await post(served, "/engine/stop", StopChoice(request_id=RequestId("g"), index=1))
    assert (response.status_code, list(served.engine.open["g"].unfinished)) == (204, [0])  # type: ignore[index]
    served.engine.go(9)
    frames = FrameReader().feed((await request).content)
    assert {choice.index for delta in frames if isinstance(delta, GroupDelta) for choice in delta.choices} == {0}
    assert (await post(served, "/engine/stop", StopChoice(request_id=RequestId("who"), index=1))).status_code == 204


@pytest.mark.parametrize("address", [("localhost", 5), ("127.0.0.1", 0), ("127.0.0.1", 70000)])
async def test_a_worker_can_only_connect_to_a_valid_address(served: Served, address: tuple[str, int]) -> None:
    assert (await post(served, "/engine/order", Connect(TransferAddress("x", *address)))).status_code == 400


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}!"])
async def test_a_gateway_gets_the_tokenizer_and_the_template_that_is_used_here(
    serve: Serving, tmp_path: Path, template: str | None
) -> None:
    folder = save_tiny_tokenizer(tmp_path / "model")
    served = await serve(tokenizer=Tokenizer.load(folder, chat_template=template))
    assert (await served.http.get("/engine/tokenizer")).status_code == 404
    (folder / "model.safetensors").write_bytes(b"weights")
    served.service.tokenizer_files = partial(read_files, folder)
    files = msgspec.msgpack.decode((await served.http.get("/engine/tokenizer")).content, type=dict[str, bytes])
    assert files.keys() == {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    own, loaded = served.tokenizer, load_files(files, chat_template=None)
    assert (loaded.encode("hello there"), loaded.chat_template) == (own.encode("hello there"), own.chat_template)
    assert ChatTemplate.of(loaded) is not None


def test_a_model_without_a_template_has_none_elsewhere(tmp_path: Path) -> None:
    folder = save_tiny_tokenizer(tmp_path, chat_template=None)
    assert read_files(folder).keys() == {"tokenizer.json", "tokenizer_config.json"}
