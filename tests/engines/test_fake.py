"""The fake engine can be a separate prefill or decode engine; `check` finds leases that have not ended."""

import asyncio

import msgspec
import pytest

from motet.errors import EngineClosedError, EngineDiedError, EngineError
from motet.ids import RequestId
from motet.testing.fake_engine import FakeEngine, FakeLeases, fake_info
from motet.transfer.ticket import TransferAddress, prompt_digest
from motet.types import ChoiceStart, GenerateRequest, SamplingParams, choice_starts

pytestmark = pytest.mark.anyio

ADDRESS = TransferAddress("prefill", "127.0.0.1", 1)
REQUEST = GenerateRequest(
    request_id=RequestId("g"),
    prompt=tuple(range(1, 35)),  # 33 tokens but the last: 3 blocks of 16
    choices=choice_starts(2, seed=1),
    sampling=SamplingParams(max_tokens=3),
)


def script(_: GenerateRequest, __: ChoiceStart) -> list[int]:
    return [7]


async def test_prefill_grants_a_lease_of_all_blocks_without_the_last_token() -> None:
    engine = FakeEngine(script, info=fake_info(transfer=ADDRESS))
    ticket = await engine.prefill(REQUEST, readers=2)
    assert ticket.address == ADDRESS
    assert ticket.remote_block_ids == (0, 1, 2)
    assert (ticket.num_tokens, ticket.readers) == (33, 2)
    assert ticket.prompt_digest == prompt_digest(REQUEST.prompt[:33])
    assert ((await engine.stats()).prefills, (await engine.stats()).leases) == (1, 1)
    with pytest.raises(AssertionError, match="leases are left"):
        engine.check()
    await engine.release(ticket)
    await engine.release(ticket)
    engine.check()


async def test_a_lease_ends_with_the_first_step_of_its_group() -> None:
    engine = FakeEngine(script)
    stream = engine.generate(await ticketed(engine))
    assert engine.leases.held
    await anext(stream)
    assert not engine.leases.held
    assert (await engine.stats()).transfers == 1
    await stream.aclose()
    engine.check()


async def test_a_group_that_is_closed_before_its_first_step_ends_its_lease() -> None:
    engine = FakeEngine(script)
    await engine.generate(await ticketed(engine)).aclose()
    engine.check()


async def test_a_dead_engine_does_not_end_the_lease_of_its_group() -> None:
    engine = FakeEngine(script, fail_after={0: EngineDiedError("gone")})
    with pytest.raises(EngineDiedError):
        await anext(engine.generate(await ticketed(engine)))
    assert not engine.open
    with pytest.raises(AssertionError, match="leases are left"):
        engine.check()


async def test_prefill_waits_and_fails_as_scripted_and_leaves_nothing_if_it_is_cancelled() -> None:
    started = asyncio.Event()

    async def wait(_: GenerateRequest) -> None:
        started.set()
        await asyncio.Event().wait()

    engine = FakeEngine(script, during_prefill=wait)
    call = asyncio.ensure_future(engine.prefill(REQUEST))
    await started.wait()
    with pytest.raises(AssertionError, match="prefills are left open: 1"):
        engine.check()
    call.cancel()
    await asyncio.wait([call])
    engine.check()

    async def fail(_: GenerateRequest) -> None:
        raise EngineError("sick")

    engine.during_prefill = fail
    with pytest.raises(EngineError, match="sick"):
        await engine.prefill(REQUEST)
    engine.check()


async def test_a_closed_engine_refuses_to_prefill() -> None:
    engine = FakeEngine(script)
    await engine.close()
    with pytest.raises(EngineClosedError):
        await engine.prefill(REQUEST)
    engine.check()


async def test_old_and_new_calls_of_a_dead_engine_end_with_the_same_error() -> None:
    engine = FakeEngine(script, gate=asyncio.Semaphore(0))
    kept = await engine.prefill(REQUEST)
    stream = engine.generate(REQUEST)
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    engine.die()
    with pytest.raises(EngineDiedError):
        await reader
    for _ in range(2):
        with pytest.raises(EngineDiedError):
            await anext(stream)
    with pytest.raises(EngineDiedError):
        await anext(engine.generate(REQUEST))
    with pytest.raises(EngineDiedError):
        await engine.prefill(REQUEST)
    with pytest.raises(EngineDiedError):
        await engine.stats()
    assert kept not in engine.leases.held.values()
    engine.check()


async def test_a_prefill_grants_nothing_if_the_engine_dies_during_it() -> None:
    engine = FakeEngine(script)

    async def die(_: GenerateRequest) -> None:
        engine.die()

    engine.during_prefill = die
    with pytest.raises(EngineDiedError):
        await engine.prefill(REQUEST)
    engine.check()


@pytest.mark.parametrize("end", ["closed", "stopped", "engine closed"])
async def test_a_reader_that_waits_for_a_step_wakes_up_when_its_group_ends(end: str) -> None:
    engine = FakeEngine(script, gate=asyncio.Semaphore(0))
    stream = engine.generate(REQUEST)
    reader = asyncio.ensure_future(anext(stream, None))
    await asyncio.sleep(0)
    match end:
        case "closed":
            await stream.aclose()
        case "stopped":
            for index in range(2):
                await engine.stop_choice(REQUEST.request_id, index)
        case _:
            await engine.close()
            with pytest.raises(EngineClosedError):
                await reader
            return
    assert await reader is None
    assert await anext(stream, None) is None
    engine.check()


def test_engines_that_share_leases_have_theirs_counted_separately() -> None:
    book = FakeLeases()
    book.grant(REQUEST, ADDRESS, readers=1, block_size=16)
    assert (book.count("prefill"), book.count("another")) == (1, 0)


async def ticketed(engine: FakeEngine) -> GenerateRequest:
    return msgspec.structs.replace(REQUEST, ticket=await engine.prefill(REQUEST))
