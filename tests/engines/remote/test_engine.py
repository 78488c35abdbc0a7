"""A server as an engine: the client gets the deltas of the server's engine, and nothing is left afterwards."""

import asyncio

import pytest

from motet.engine import WorkerState
from motet.errors import (
    ContextLengthError,
    DrainingError,
    EngineClosedError,
    EngineDiedError,
    EngineError,
    EngineSilentError,
    MotetError,
    NoWorkerError,
    OverloadedError,
    RequestError,
    WorkerLeavingError,
)
from motet.testing.fake_engine import FakeEngine, FakeGroup
from motet.types import (
    ChoiceStart,
    GenerateRequest,
    Grammar,
    GrammarKind,
    GroupDelta,
    LogprobsMode,
    SamplingParams,
    Thinking,
)
from tests.api.serving import Served, Serving, WatchedEngine
from tests.engines.remote.worker import SAMPLING, ReportingEngine, counting, deltas_of, endless, engine_at, group

pytestmark = pytest.mark.anyio


async def test_the_report_has_the_workers_state_info_and_figures(served: Served) -> None:
    async with engine_at(served.url) as engine:
        report = await engine.server.report()
        assert (report.state, report.info, report.block_events) == (WorkerState.READY, served.engine.info, None)
        assert report.stats == await served.engine.stats() == await engine.stats()
        assert engine.engine_id == report.engine_id
        assert engine.info == served.engine.info


async def test_each_start_of_a_server_has_its_own_id(serve: Serving) -> None:
    one, other = await serve(), await serve()
    async with engine_at(one.url) as first, engine_at(other.url) as second:
        assert first.engine_id == (await first.server.report()).engine_id != second.engine_id


GRAMMAR = Grammar(GrammarKind.JSON, '{"type": "object"}', Thinking("<think>", "</think>", opened=True))


@pytest.mark.parametrize("n", [1, 3, 64])
@pytest.mark.parametrize(
    "sampling",
    [
        SAMPLING,
        SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=50, stop_token_ids=(11, 14)),
        SamplingParams(max_tokens=9, ignore_eos=True, min_tokens=2, logit_bias={3: -1.5}),
        SamplingParams(max_tokens=4, grammar=GRAMMAR),
        SamplingParams(max_tokens=4, allowed_token_ids=(11, 12)),
        SamplingParams(max_tokens=4, logprobs=0, logprob_token_ids=(9, 8), logprobs_mode=LogprobsMode.PROCESSED),
    ],
    ids=["plain", "logprobs", "stop tokens", "length", "grammar", "allowed", "processed logprobs"],
)
async def test_deltas_arrive_as_the_engine_sends_them(serve: Serving, n: int, sampling: SamplingParams) -> None:
    served = await serve(counting)
    request = group(n=n, sampling=sampling)
    async with engine_at(served.url) as engine:
        through = await deltas_of(engine, request)
    assert through == await deltas_of(FakeEngine(counting), request)
    assert served.engine.requests == [request]


async def test_resumed_choices_continue_where_they_were(serve: Serving) -> None:
    served = await serve(counting)
    choices = (ChoiceStart(7, 2**64 - 1, (17, 18)), ChoiceStart(2, 5, ()), ChoiceStart(4, 9, (14, 15, 16, 17)))
    request = group(choices=choices)
    async with engine_at(served.url) as engine:
        through = await deltas_of(engine, request)
    assert through == await deltas_of(FakeEngine(counting), request)
    assert served.engine.requests == [request]


@pytest.mark.slow
async def test_many_groups_at_once_are_kept_apart(serve: Serving) -> None:
    served = await serve(counting)
    requests = [group(f"g{i}", n=1 + i % 4) for i in range(40)]
    async with engine_at(served.url) as engine:
        answers = await asyncio.gather(*(deltas_of(engine, request) for request in requests))
    assert answers == [await deltas_of(FakeEngine(counting), request) for request in requests]


async def test_a_group_is_submitted_before_it_is_read(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(endless, gated=True))
    async with engine_at(served.url) as engine:
        stream = engine.generate(group())
        await served.engine.submitted.acquire()
        await stream.aclose()
        await served.until_empty()


@pytest.mark.parametrize(
    ("error", "received"),
    [
        (ContextLengthError("too long", param="prompt"), ContextLengthError),
        (RequestError("no", param="n", code="odd"), RequestError),
        (EngineDiedError("gone"), EngineDiedError),
        (EngineSilentError("silent"), EngineSilentError),
        (NoWorkerError("nobody"), EngineDiedError),
        (EngineClosedError("closed"), WorkerLeavingError),
        (DrainingError("draining", retry_after_s=3), WorkerLeavingError),
        (OverloadedError("full", retry_after_s=3), OverloadedError),
        (EngineError("sick"), EngineError),
        (WorkerLeavingError("leaves"), WorkerLeavingError),
    ],
)
@pytest.mark.parametrize("step", [0, 2])
async def test_an_error_of_the_engine_comes_after_the_deltas_before_it(
    serve: Serving, error: MotetError, received: type[MotetError], step: int
) -> None:
    served = await serve(engine=WatchedEngine(counting, fail_after={step: error}))
    async with engine_at(served.url) as engine:
        stream = engine.generate(group())
        expected = FakeEngine(counting).generate(group())
        for _ in range(step):
            assert await anext(stream) == await anext(expected)
        with pytest.raises(MotetError, match=error.message) as caught:
            await anext(stream)
    assert type(caught.value) is received
    if received is type(error):
        assert vars(caught.value) == vars(error)
    await served.until_empty()


async def test_a_stopped_choice_ends_on_the_server_and_the_others_continue(serve: Serving) -> None:
    server_engine = ReportingEngine(gated=True)
    served = await serve(engine=server_engine)
    async with engine_at(served.url) as engine:
        stream = engine.generate(group(n=3, sampling=SamplingParams(max_tokens=4)))
        served.engine.steps.release()
        assert [choice.index for choice in (await anext(stream)).choices] == [0, 1, 2]
        await engine.stop_choice(group().request_id, 1)
        await server_engine.stopped.wait()
        for _ in range(9):
            served.engine.steps.release()
        assert [[choice.index for choice in delta.choices] async for delta in stream] == [[0, 2]] * 3
        await served.until_empty()


async def test_stopping_the_last_choice_ends_the_group(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(endless, gated=True))
    async with engine_at(served.url) as engine:
        stream = engine.generate(group(n=2))
        served.engine.steps.release()
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream, None))
        await engine.stop_choice(group().request_id, 0)
        await engine.stop_choice(group().request_id, 1)
        assert await waiting is None
        await served.until_empty()


async def test_stopping_a_choice_of_an_unknown_group_does_nothing(served: Served) -> None:
    async with engine_at(served.url) as engine:
        await engine.stop_choice(group().request_id, 0)
        assert len(await deltas_of(engine, group())) > 1
        await engine.stop_choice(group().request_id, 0)


@pytest.mark.parametrize("steps", [0, 1, 3])
async def test_closing_a_stream_frees_the_group_at_once(serve: Serving, steps: int) -> None:
    served = await serve(engine=WatchedEngine(endless, gated=True))
    async with engine_at(served.url) as engine:
        stream = engine.generate(group())
        await served.engine.submitted.acquire()
        for _ in range(steps):
            served.engine.steps.release()
            await anext(stream)
        await stream.aclose()
        await stream.aclose()
        assert await anext(stream, None) is None
        await served.until_empty()


async def test_closing_a_stream_before_it_was_sent_opens_nothing(served: Served) -> None:
    async with engine_at(served.url) as engine:
        stream = engine.generate(group())
        await stream.aclose()
        assert await anext(stream, None) is None
        assert len(await deltas_of(engine, group("other"))) > 1
    assert [request.request_id for request in served.engine.requests] == ["other"]


async def test_a_reader_that_was_cancelled_can_continue_to_read(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(counting, gated=True))
    async with engine_at(served.url) as engine:
        stream = engine.generate(group())
        for _ in range(2):
            reading = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])
        for _ in range(20):
            served.engine.steps.release()
        assert [delta async for delta in stream] == await deltas_of(FakeEngine(counting), group())


@pytest.mark.slow
async def test_a_slow_reader_does_not_hold_up_others_or_fill_memory(serve: Serving) -> None:
    """The server can send only as much ahead as its outbox and the sockets hold."""
    sampling = SamplingParams(max_tokens=3000, logprobs=20)
    served = await serve(endless)
    async with engine_at(served.url) as engine:
        slow = engine.generate(group("slow", n=64, sampling=sampling))
        await anext(slow)
        assert len(await deltas_of(engine, group("quick", n=2, sampling=SamplingParams(max_tokens=500)))) == 500
        server_engine = served.engine.open[group("slow").request_id]
        assert server_engine.step < 1000
        await slow.aclose()
        await served.until_empty()


class LateEnd(FakeGroup):
    """A group whose stream does not end after its last delta."""

    async def __anext__(self) -> GroupDelta:
        if self.step and not self.unfinished:
            await asyncio.Event().wait()
        return await super().__anext__()


class EndsLate(WatchedEngine):
    def generate(self, request: GenerateRequest) -> FakeGroup:
        super().generate(request)
        self.open[request.request_id] = late = LateEnd(self, request)
        return late


async def test_a_group_counts_as_sent_once_every_choice_has_ended(serve: Serving) -> None:
    """A reader that has the end of every choice does not wait for the end of the body."""
    served = await serve(engine=EndsLate(counting))
    async with engine_at(served.url) as engine:
        assert await deltas_of(engine, group()) == await deltas_of(FakeEngine(counting), group())
        await served.until_empty()
    assert 'motet:groups_total{model_name="tiny",status="200"} 1.0' in (await served.http.get("/metrics")).text
