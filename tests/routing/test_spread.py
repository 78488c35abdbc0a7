"""A reader gets the same from a group in parts as from a group in one part, for one prefill."""

import asyncio

import msgspec
import pytest

from motet.errors import EngineDiedError, EngineError, OverloadedError
from motet.settings.server_config import CellConfig
from motet.transfer.ticket import TransferAddress
from motet.types import GenerateRequest, choice_starts
from tests.clock import settle
from tests.routing.scene import ANY_MODEL, APART, ControlledPrefill, Received, Scene, SlowPrefill, group, uninterrupted

pytestmark = pytest.mark.anyio

N = 8


def decoding(count: int, kind: str = "decode") -> tuple[str, ...]:
    return tuple(f"{kind}-{number}" for number in range(count))


def parts_of(scene: Scene) -> list[list[int]]:
    """Returns the indices of the choices of each group that a worker got."""
    return [[start.index for start in one.choices] for one in scene.requests]


@pytest.mark.parametrize(
    ("workers", "parts"),
    [(2, [[0, 1, 2, 3], [4, 5, 6, 7]]), (3, [[0, 1, 2], [3, 4, 5], [6, 7]]), (4, [[0, 1], [2, 3], [4, 5], [6, 7]])],
)
async def test_a_large_group_is_generated_in_parts_after_one_prefill(workers: int, parts: list[list[int]]) -> None:
    scene, request = Scene("prefill-0", *decoding(workers), spread_choices=4), group(n=N, logprobs=1)
    received = await Received().read(scene.router.generate(request), request)
    assert received == await uninterrupted(request)
    assert parts_of(scene) == parts
    assert [len(engine.requests) for engine in scene.all] == [0] + [1] * workers
    assert scene.prefills == ["g"]
    assert scene.pulls == workers
    assert {one.ticket and one.ticket.readers for one in scene.requests} == {workers}
    assert scene.router.counts.spreads == 1


async def test_every_delta_of_a_group_in_parts_names_its_worker() -> None:
    scene, request = Scene(*APART, spread_choices=4), group(n=N)
    worker_of: dict[int, set[str]] = {}
    async for delta in scene.router.generate(request):
        for choice in delta.choices:
            worker_of.setdefault(choice.index, set()).add(delta.worker)
    assert worker_of == {index: {"decode-0" if index < N // 2 else "decode-1"} for index in range(N)}


async def test_a_part_keeps_indices_seeds_and_settings_and_has_its_own_id() -> None:
    scene, request = Scene(*APART, spread_choices=4), group(n=N)
    await Received().read(scene.router.generate(request), request)
    first, second = scene.requests
    assert first.choices + second.choices == request.choices
    assert [one.request_id for one in scene.requests] == ["g/0", "g/1"]
    for part in scene.requests:
        complete = {"request_id": request.request_id, "choices": request.choices, "ticket": None}
        assert msgspec.structs.replace(part, **complete) == request


async def test_choices_with_output_tokens_continue_from_there() -> None:
    scene, request = Scene(*APART, spread_choices=4), group(n=N)
    complete = await uninterrupted(request)
    starts = [
        msgspec.structs.replace(one, output_tokens=tuple(complete.tokens[one.index][:2])) for one in request.choices
    ]
    resumed = msgspec.structs.replace(request, choices=tuple(starts))
    received = await Received().read(scene.router.generate(resumed), resumed)
    assert received.tokens == {index: tokens[2:] for index, tokens in complete.tokens.items()}


async def test_without_prefill_workers_every_part_computes_a_short_prompt() -> None:
    scene = Scene(*decoding(2, "both"), spread_choices=4)
    request = group(n=N, prompt_tokens=20)
    assert await Received().read(scene.router.generate(request), request) == await uninterrupted(request)
    assert parts_of(scene) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [one.ticket for one in scene.requests] == [None, None]
    assert [len(engine.requests) for engine in scene.all] == [1, 1]


async def test_a_bypass_is_counted_once_whether_the_group_is_split_or_not() -> None:
    scene = Scene(*APART, spread_choices=4)
    for name, tokens in (("split", 20), ("whole", 127)):
        request = group(name, n=N, prompt_tokens=tokens)
        await Received().read(scene.router.generate(request), request)
    assert [one.request_id for one in scene.requests] == ["split/0", "split/1", "whole"]
    assert scene.router.counts.bypasses["short"] == 2
    assert scene.router.counts.spreads == 1


async def test_the_prompt_is_reported_once() -> None:
    scene = Scene(*decoding(2, "both"), spread_choices=4)
    request = group(n=N, prompt_tokens=20, prompt_logprobs=0)
    received = await Received().read(scene.router.generate(request), request)
    assert received == await uninterrupted(request)
    (report,) = received.prompts
    assert report.logprobs is not None


def greedy(request: GenerateRequest) -> GenerateRequest:
    sampling = msgspec.structs.replace(request.sampling, temperature=0.0)
    return msgspec.structs.replace(request, sampling=sampling)


def with_ticket(request: GenerateRequest, scene: Scene) -> GenerateRequest:
    ticket = scene.leases.grant(request, TransferAddress("elsewhere", "127.0.0.1", 1), readers=1, block_size=16)
    return msgspec.structs.replace(request, ticket=ticket)


async def test_greedy_groups_small_groups_and_groups_with_a_ticket_are_not_split() -> None:
    scene = Scene(*APART, spread_choices=4)
    requests = [group("small", n=4), greedy(group("greedy", n=N)), with_ticket(group("ticket", n=N), scene)]
    for request in requests:
        stream = scene.router.generate(request)
        await Received().read(stream, request)
    assert [one.request_id for one in scene.requests] == ["greedy", "small", "ticket"]
    assert scene.router.counts.spreads == 0


@pytest.mark.parametrize("prompt_tokens", [20, 200])
async def test_a_large_group_that_is_not_worth_splitting_is_not_split(prompt_tokens: int) -> None:
    """It goes to prefill as a small group does."""
    scene, request = Scene("prefill-0", "decode-0", spread_choices=4), group(n=N, prompt_tokens=prompt_tokens)
    assert await Received().read(scene.router.generate(request), request) == await uninterrupted(request)
    assert len(scene.prefills) == (prompt_tokens == 200)
    assert scene.router.counts.bypasses["short"] == (prompt_tokens == 20)
    assert scene.router.counts.spreads == 0


@pytest.mark.parametrize("error", [EngineError("sick"), OverloadedError("full"), EngineDiedError("gone")])
async def test_when_prefill_fails_one_worker_computes_the_prompt(error: EngineError | OverloadedError) -> None:
    scene, request = Scene(*APART, spread_choices=4), group(n=N)
    scene.engines["prefill-0"].during_prefill = SlowPrefill(error)
    received = await Received().read(scene.router.generate(request), request)
    assert received == await uninterrupted(request)
    assert parts_of(scene) == [list(range(N))]
    assert [one.ticket for one in scene.requests] == [None]
    assert scene.prefills == ["g"]
    assert sum(scene.router.counts.bypasses.values()) == 1


async def test_when_prefill_is_late_one_worker_computes_the_prompt() -> None:
    scene, request = Scene(*APART, spread_choices=4, cell=CellConfig(prefill_timeout_s=0.01)), group(n=N)
    scene.engines["prefill-0"].during_prefill = ControlledPrefill()
    received = await Received().read(scene.router.generate(request), request)
    assert received == await uninterrupted(request)
    assert parts_of(scene) == [list(range(N))]
    assert scene.router.counts.bypasses["prefill-late"] == 1


async def test_choices_in_parts_are_counted_as_prefilling_until_decode_has_them() -> None:
    scene, request, controlled = Scene(*APART, spread_choices=4), group(n=N), ControlledPrefill()
    scene.engines["prefill-0"].during_prefill = controlled
    scene.gate(0)
    stream = scene.router.generate(request)
    await controlled.entered.wait()
    assert scene.router.dispatcher.prefiller.choices_in_progress(ANY_MODEL) == N
    await scene.router.stop_choice(request.request_id, 5)
    assert scene.router.dispatcher.prefiller.choices_in_progress(ANY_MODEL) == N - 1
    controlled.may_end.set()
    await settle()
    assert scene.router.dispatcher.prefiller.choices_in_progress(ANY_MODEL) == 0
    assert sum(member.load.open_choices for member in scene.fleet.members) == N - 1
    await stream.aclose()


async def test_a_slow_reader_slows_the_parts_down() -> None:
    scene = Scene(*decoding(4), spread_choices=64)
    sampling = msgspec.structs.replace(group().sampling, max_tokens=1000, ignore_eos=True)
    request = msgspec.structs.replace(group(), prompt=(1, 2, 3), choices=choice_starts(128, seed=0), sampling=sampling)
    for engine in scene.all:
        engine.scenario.script = lambda _, start: [start.index]
    stream = scene.router.generate(request)
    await settle()
    parts = len(scene.requests)
    assert parts == 4
    steps = scene.generated_tokens // (128 // parts)
    assert steps <= 3 * parts, "two deltas a part in the queue, and one that waits"
    await anext(stream)
    await settle()
    assert scene.generated_tokens // (128 // parts) == steps + 1
    await stream.aclose()


async def test_concurrent_large_groups_have_the_tokens_that_they_would_have_alone() -> None:
    scene = Scene("prefill-0", *decoding(3), spread_choices=4)
    requests = [group(f"g{number}", n=N) for number in range(6)]
    reading = [Received().read(scene.router.generate(request), request) for request in requests]
    for received, request in zip(await asyncio.gather(*reading), requests, strict=True):
        assert received == await uninterrupted(request)
    assert scene.router.counts.spreads == 6
    assert len(scene.prefills) == 6
