"""What a reader gets of a group in parts is what it would have got of it in one piece, for one prefill."""

import asyncio

import msgspec
import pytest

from motet.errors import EngineDiedError, EngineError, OverloadedError
from motet.routing.bypass import BypassRules
from motet.transfer.ticket import TransferAddress
from motet.types import GenerateRequest, choice_starts
from tests.routing.cell import ANY_MODEL, Hold, group
from tests.routing.moving import Heard, settle, undisturbed, wish
from tests.routing.spreading import APART, Failing, Spreading

pytestmark = pytest.mark.anyio

N = 8


def decoding(count: int, kind: str = "decode") -> tuple[str, ...]:
    return tuple(f"{kind}-{number}" for number in range(count))


def parts_of(scene: Spreading) -> list[list[int]]:
    """Numbers of the choices of each group that a worker was given."""
    return [[start.index for start in one.choices] for one in scene.asked]


@pytest.mark.parametrize(
    ("workers", "parts"),
    [
        (2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (3, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
async def test_a_large_group_is_written_in_parts_after_one_prefill(workers: int, parts: list[list[int]]) -> None:
    scene, request = Spreading("prefill-0", *decoding(workers)), wish(n=N, logprobs=1)
    heard = await Heard().read(scene.spread.generate(request), request)
    assert heard == await undisturbed(request)
    assert parts_of(scene) == parts
    assert [len(engine.requests) for engine in scene.all] == [0] + [1] * workers
    assert scene.prefills == ["g"]
    assert scene.pulls == workers
    assert {one.ticket and one.ticket.readers for one in scene.asked} == {workers}
    assert scene.spread.spreads == 1
    scene.check()


async def test_a_part_has_the_numbers_seeds_and_wishes_of_the_whole_and_a_name_of_its_own() -> None:
    scene, request = Spreading(*APART), wish(n=N)
    await Heard().read(scene.spread.generate(request), request)
    first, second = scene.asked
    assert first.choices + second.choices == request.choices
    assert [one.request_id for one in scene.asked] == ["g/0", "g/1"]
    for part in scene.asked:
        whole = {"request_id": request.request_id, "choices": request.choices, "ticket": None}
        assert msgspec.structs.replace(part, **whole) == request
    scene.check()


async def test_choices_that_have_written_before_go_on_from_there() -> None:
    scene, request = Spreading(*APART), wish(n=N)
    whole = await undisturbed(request)
    starts = [msgspec.structs.replace(one, written=tuple(whole.tokens[one.index][:2])) for one in request.choices]
    resumed = msgspec.structs.replace(request, choices=tuple(starts))
    heard = await Heard().read(scene.spread.generate(resumed), resumed)
    assert heard.tokens == {index: tokens[2:] for index, tokens in whole.tokens.items()}
    scene.check()


async def test_without_prefill_workers_every_part_computes_a_short_prompt() -> None:
    scene = Spreading(*decoding(2, "both"))
    request = group(n=N, prompt_tokens=20)
    assert await Heard().read(scene.spread.generate(request), request) == await undisturbed(request)
    assert parts_of(scene) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [one.ticket for one in scene.asked] == [None, None]
    assert [len(engine.requests) for engine in scene.all] == [1, 1]
    scene.check()


async def test_a_bypass_is_counted_once_whether_the_group_is_split_or_not() -> None:
    scene = Spreading(*APART)
    for name, tokens in (("split", 20), ("whole", 127)):
        request = group(name, n=N, prompt_tokens=tokens)
        await Heard().read(scene.spread.generate(request), request)
    assert [one.request_id for one in scene.asked] == ["split/0", "split/1", "whole"]
    assert scene.apart.bypasses["short"] == 2
    assert scene.spread.spreads == 1
    scene.check()


async def test_the_prompt_is_reported_once() -> None:
    scene = Spreading(*decoding(2, "both"))
    request = group(n=N, prompt_tokens=20, prompt_logprobs=0)
    heard = await Heard().read(scene.spread.generate(request), request)
    assert heard == await undisturbed(request)
    (report,) = heard.prompts
    assert report.logprobs is not None
    scene.check()


def greedy(request: GenerateRequest) -> GenerateRequest:
    sampling = msgspec.structs.replace(request.sampling, temperature=0.0)
    return msgspec.structs.replace(request, sampling=sampling)


def with_ticket(request: GenerateRequest, scene: Spreading) -> GenerateRequest:
    ticket = scene.leases.grant(request, TransferAddress("elsewhere", "127.0.0.1", 1), readers=1, block_size=16)
    return msgspec.structs.replace(request, ticket=ticket)


async def test_greedy_groups_small_ones_and_those_with_a_ticket_stay_whole() -> None:
    scene = Spreading(*APART)
    requests = [wish("small", n=4), greedy(wish("greedy", n=N)), with_ticket(wish("ticket", n=N), scene)]
    for request in requests:
        stream = scene.spread.generate(request)
        await Heard().read(stream, request)
    assert [one.request_id for one in scene.asked] == ["greedy", "small", "ticket"]
    assert scene.spread.spreads == 0
    scene.check()


@pytest.mark.parametrize("prompt_tokens", [20, 200])
async def test_a_large_group_that_is_not_worth_splitting_is_handed_down(prompt_tokens: int) -> None:
    """Nothing is put around its stream, and it is for prefill as a small one is."""
    scene, request = Spreading("prefill-0", "decode-0"), group(n=N, prompt_tokens=prompt_tokens)
    stream = scene.spread.generate(request)
    assert type(stream) is type(scene.engine.generate(wish("other")))
    heard = await Heard().read(stream, request)
    assert heard == await undisturbed(request)
    assert scene.prefills.count("g") == (prompt_tokens == 200)
    assert scene.apart.bypasses["short"] == (prompt_tokens == 20)
    assert scene.spread.spreads == 0
    await scene.engine.close()


@pytest.mark.parametrize("error", [EngineError("sick"), OverloadedError("full"), EngineDiedError("gone")])
async def test_when_prefill_fails_one_worker_computes_the_prompt(error: EngineError | OverloadedError) -> None:
    scene, request = Spreading(*APART), wish(n=N)
    scene.engines["prefill-0"].during_prefill = Failing(error)
    heard = await Heard().read(scene.spread.generate(request), request)
    assert heard == await undisturbed(request)
    assert parts_of(scene) == [list(range(N))]
    assert [one.ticket for one in scene.asked] == [None]
    assert scene.prefills == ["g"]
    assert sum(scene.apart.bypasses.values()) == 1
    scene.check()


async def test_when_prefill_is_late_one_worker_computes_the_prompt() -> None:
    scene, request = Spreading(*APART, rules=BypassRules(prefill_timeout_s=0.01)), wish(n=N)
    scene.engines["prefill-0"].during_prefill = Hold()
    heard = await Heard().read(scene.spread.generate(request), request)
    assert heard == await undisturbed(request)
    assert parts_of(scene) == [list(range(N))]
    assert scene.apart.bypasses["prefill-late"] == 1
    scene.check()


async def test_choices_are_on_the_way_until_decode_has_them() -> None:
    scene, request, hold = Spreading(*APART), wish(n=N), Hold()
    scene.engines["prefill-0"].during_prefill = hold
    scene.gate(0)
    stream = scene.spread.generate(request)
    await hold.entered.wait()
    assert scene.spread.choices_on_the_way(ANY_MODEL) == N
    await scene.spread.stop_choice(request.request_id, 5)
    assert scene.spread.choices_on_the_way(ANY_MODEL) == N - 1
    hold.go.set()
    await settle()
    assert scene.spread.choices_on_the_way(ANY_MODEL) == 0
    assert sum(member.open_choices for member in scene.fleet.members) == N - 1
    await stream.aclose()
    scene.check()


async def test_a_slow_reader_holds_the_parts_back() -> None:
    scene = Spreading(*decoding(4), spread_choices=64)
    sampling = msgspec.structs.replace(wish().sampling, max_tokens=1000, ignore_eos=True)
    request = msgspec.structs.replace(wish(), prompt=(1, 2, 3), choices=choice_starts(128, seed=0), sampling=sampling)
    for engine in scene.all:
        engine.script = lambda _, start: [start.index]
    stream = scene.spread.generate(request)
    await settle()
    parts = len(scene.asked)
    assert parts == 4
    steps = scene.written // (128 // parts)
    assert steps <= 3 * parts, "two deltas a part in the queue, and one that waits"
    await anext(stream)
    await settle()
    assert scene.written // (128 // parts) == steps + 1
    await stream.aclose()
    scene.check()


async def test_large_groups_side_by_side_are_each_what_they_would_be_alone() -> None:
    scene = Spreading("prefill-0", *decoding(3))
    requests = [wish(f"g{number}", n=N) for number in range(6)]
    reading = [Heard().read(scene.spread.generate(request), request) for request in requests]
    for heard, request in zip(await asyncio.gather(*reading), requests, strict=True):
        assert heard == await undisturbed(request)
    assert scene.spread.spreads == 6
    assert len(scene.prefills) == 6
    scene.check()


async def test_what_is_not_of_a_group_is_passed_on() -> None:
    scene = Spreading("prefill-0", "decode-0")
    ticket = await scene.spread.prefill(wish(), readers=2)
    assert ticket.readers == 2
    await scene.spread.release(ticket)
    assert scene.spread.info == scene.apart.info
    assert await scene.spread.stats() == await scene.engines["decode-0"].stats()
    await scene.spread.close()
    assert all(engine.closed for engine in scene.all)
    scene.check()


async def test_a_group_that_is_open_is_noticed() -> None:
    scene = Spreading(*APART)
    stream = scene.spread.generate(wish(n=N))
    with pytest.raises(AssertionError, match="groups left open"):
        scene.spread.check()
    await stream.aclose()
    scene.check()
