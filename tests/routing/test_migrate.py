"""A reader gets the same from a group whose workers die or leave as from one that stays."""

import msgspec
import pytest

from motet.engine import Worker, WorkerState
from motet.errors import EngineSilentError
from motet.transfer.ticket import TransferAddress
from tests.clock import settle
from tests.routing.scene import Received, Scene, group, length, uninterrupted

pytestmark = pytest.mark.anyio

N = 3
STEPS = length(N - 1)
"""Number of tokens of the longest choice."""
FLEETS = [("both-0", "both-1", "both-2"), ("prefill-0", "decode-0", "decode-1")]


@pytest.mark.parametrize("names", FLEETS, ids=["alike", "apart"])
@pytest.mark.parametrize("steps", range(STEPS + 1))
async def test_a_worker_that_dies_after_any_step_is_not_noticed_in_any_choice(
    steps: int, names: tuple[str, ...]
) -> None:
    scene, request, received = Scene(*names), group(n=N, logprobs=2), Received()
    stream = scene.router.generate(request)
    await settle()
    for _ in range(steps):
        received.take(await anext(stream), request)
    for name in scene.generating():
        scene.kill(name)
    assert await received.read(stream, request) == await uninterrupted(request)
    moves = 1 if steps < STEPS else 0
    assert len(scene.requests) == 1 + moves
    assert scene.moves == ({("died", "resumed"): 1} if moves else {})
    open_choices = [index for index in range(N) if length(index) > steps]
    assert scene.router.counts.choices_resumed == len(open_choices)
    assert scene.router.counts.tokens_replayed == steps * len(open_choices)


@pytest.mark.parametrize("steps", range(STEPS))
async def test_a_group_can_lose_a_worker_at_every_step(steps: int) -> None:
    names = [f"both-{number}" for number in range(STEPS + 1)]
    scene, request, received = Scene(*names, limit=STEPS), group(n=N, logprobs=1), Received()
    stream = scene.router.generate(request)
    for step in range(STEPS):
        if step >= steps:
            for name in scene.generating():
                scene.kill(name)
        received.take(await anext(stream), request)
    assert await received.read(stream, request) == await uninterrupted(request)
    assert scene.moves == {("died", "resumed"): STEPS - steps}


async def test_a_resumed_group_has_its_output_tokens_and_a_new_id() -> None:
    scene, request, received = Scene("both-0", "both-1", "both-2"), group(n=N), Received()
    complete = await uninterrupted(request)
    stream = scene.router.generate(request)
    for _ in range(length(0)):
        received.take(await anext(stream), request)
    scene.generating_engine().die()
    received.take(await anext(stream), request)
    scene.generating_engine().die()
    await received.read(stream, request)
    first, second, third = scene.requests
    assert first == request
    assert [one.request_id for one in (second, third)] == ["g.1", "g.2"]
    output = {start.index: list(start.output_tokens) for start in second.choices}
    assert output == {index: complete.tokens[index][: length(0)] for index in (1, 2)}  # choice 0 had finished
    output = {start.index: list(start.output_tokens) for start in third.choices}
    assert output == {index: complete.tokens[index][: length(0) + 1] for index in (1, 2)}
    assert [start.seed for start in third.choices] == [start.seed for start in request.choices[1:]]
    assert (third.prompt, third.sampling, third.trace) == (request.prompt, request.sampling, request.trace)


@pytest.mark.parametrize("steps", [0, 1, 3])
async def test_the_prompt_is_reported_once(steps: int) -> None:
    scene, request, received = Scene("both-0", "both-1"), group(prompt_logprobs=0), Received()
    complete = await uninterrupted(request)
    stream = scene.router.generate(request)
    for _ in range(steps):
        received.take(await anext(stream), request)
    scene.generating_engine().die()
    await received.read(stream, request)
    assert received == complete
    (report,) = received.prompts
    assert report.logprobs is not None
    assert len(report.logprobs) == len(request.prompt)
    # No worker computes the rows of the prompt once more, because they have been reported.
    assert scene.requests[1].sampling.prompt_logprobs == (0 if steps == 0 else None)


@pytest.mark.parametrize("steps", [0, 1, 4])
async def test_the_groups_of_a_leaving_worker_continue_on_another_one(steps: int) -> None:
    scene, request, received = Scene("both-0", "both-1"), group(), Received()
    stream = scene.router.generate(request)
    for _ in range(steps):
        received.take(await anext(stream), request)
    (leaving,) = scene.generating()
    await scene.evict(leaving)
    assert scene.generating() == []
    assert await received.read(stream, request) == await uninterrupted(request)
    assert scene.moves == {("leaving", "resumed"): 1}


async def test_each_delta_after_a_move_names_its_worker() -> None:
    """The bug: choices that continue have deltas in different steps, and all but the first seemed not to move."""
    scene, request = Scene("both-0", "both-1"), group()
    stream = scene.router.generate(request)
    first, second = await anext(stream), await anext(stream)
    (lost,) = scene.generating()
    scene.generating_engine().die()
    moved = [delta.worker async for delta in stream]
    assert (first.worker, second.worker) == (lost, "")
    assert set(moved) == {"both-0", "both-1"} - {lost}


async def test_a_group_whose_worker_falls_silent_continues_on_another_one() -> None:
    scene, request, received = Scene("both-0", "both-1"), group(), Received()
    stream = scene.router.generate(request)
    received.take(await anext(stream), request)
    scene.generating_engine().die(EngineSilentError("no heartbeats"))
    assert await received.read(stream, request) == await uninterrupted(request)
    assert scene.moves == {("silent", "resumed"): 1}


async def test_many_groups_of_one_worker_all_continue() -> None:
    scene = Scene("both-0", "both-1", "both-2")
    requests = [group(f"g{number}", n=2) for number in range(12)]
    streams = [scene.router.generate(request) for request in requests]
    all_received = [Received() for _ in requests]
    for steps, (stream, received, request) in enumerate(zip(streams, all_received, requests, strict=True)):
        for _ in range(steps % 3):
            received.take(await anext(stream), request)
    lost = len(scene.engines["both-1"].open)
    scene.kill("both-1")
    for stream, received, request in zip(streams, all_received, requests, strict=True):
        assert await received.read(stream, request) == await uninterrupted(request)
    assert lost > 1
    assert scene.moves == {("died", "resumed"): lost}


async def test_a_resumed_group_prefills_once_more_and_does_not_reuse_its_first_ticket() -> None:
    scene, request, received = Scene("prefill-0", "decode-0", "decode-1"), group(), Received()
    stream = scene.router.generate(request)
    received.take(await anext(stream), request)
    scene.generating_engine().die()
    assert await received.read(stream, request) == await uninterrupted(request)
    assert [one.request_id for one in scene.engines["prefill-0"].prefills] == ["g", "g.1"]
    tickets = [one.ticket and one.ticket.remote_request_id for one in scene.requests]
    assert tickets == ["g", "g.1"]
    assert set(scene.router.counts.bypasses.values()) == {0}


@pytest.mark.parametrize(("steps", "leases_left"), [(0, 1), (1, 0)])
async def test_a_ticket_of_the_client_is_not_used_again_when_its_group_moves(steps: int, leases_left: int) -> None:
    scene, received = Scene("decode-0", "decode-1"), Received()
    unknown = TransferAddress("unknown", "127.0.0.1", 1)
    ticket = scene.leases.grant(group(), unknown, readers=1, block_size=16)
    request = msgspec.structs.replace(group(), ticket=ticket)
    stream = scene.router.generate(request)
    for _ in range(steps):
        received.take(await anext(stream), request)
    scene.generating_engine().die()
    assert await received.read(stream, request) == await uninterrupted(group())
    assert [one.ticket for one in scene.requests] == [ticket, None]
    assert len(scene.leases.held) == leases_left  # the lease of a dead worker is not released: it expires
    scene.leases.held.clear()


@pytest.mark.parametrize(("other", "logged"), [("fake-same", "equal"), ("other-same", "other")])
async def test_the_log_says_if_the_text_can_differ_after_a_move(
    other: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It used to continue with other weights without a log line."""
    scene, request, received = Scene("both-0", "both-1"), group(n=N), Received()
    stream = scene.router.generate(request)
    received.take(await anext(stream), request)
    (lost,) = scene.generating()
    (rest,) = {"both-0", "both-1"} - {lost}
    scene.engines[rest].info = msgspec.structs.replace(scene.engines[rest].info, fingerprint=other)
    scene.kill(lost)
    await received.read(stream, request)
    (fields,) = [record.__dict__["fields"] for record in caplog.records if "continues on" in record.message]
    assert [fields[name] for name in ("fingerprint", "from", "to")] == [logged, lost, rest]


async def test_each_worker_is_named_at_its_first_delta_and_after_a_move_only() -> None:
    """A worker can be a server with several engines, between which the group moves too."""
    inner, outer, request = Scene("both-0", "both-1"), Scene(), group(n=N)
    for name in ("server-0", "server-1"):
        outer.fleet.put(Worker(name, inner.router.placed(), "10.0.0.1:8000", local=False))
    stream = outer.router.generate(request)
    deltas = [await anext(stream)]
    inner.generating_engine().die()
    deltas.append(await anext(stream))
    outer.fleet.mark(first := deltas[0].worker, WorkerState.DRAINING)
    await outer.evict(first)
    deltas += [delta async for delta in stream]
    second = {"server-0": "server-1", "server-1": "server-0"}[first]
    assert [delta.worker for delta in deltas] == [first, "", *[second] * (len(deltas) - 2)]
    assert len(inner.requests) == 3
