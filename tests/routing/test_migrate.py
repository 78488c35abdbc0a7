"""A reader gets the same from a group whose workers die or leave as from one that stays."""

import msgspec
import pytest

from motet.engine import Worker, WorkerState
from motet.errors import EngineSilentError
from motet.transfer.ticket import TransferAddress
from tests.routing.scene import Heard, Scene, group, length, settle, undisturbed

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
    scene, request, heard = Scene(*names), group(n=N, logprobs=2), Heard()
    stream = scene.router.generate(request)
    await settle()
    for _ in range(steps):
        heard.take(await anext(stream), request)
    for name in scene.writers():
        scene.kill(name)
    assert await heard.read(stream, request) == await undisturbed(request)
    moves = 1 if steps < STEPS else 0
    assert len(scene.asked) == 1 + moves
    assert scene.moves == ({("died", "resumed"): 1} if moves else {})
    open_choices = [index for index in range(N) if length(index) > steps]
    assert scene.router.counts.choices_resumed == len(open_choices)
    assert scene.router.counts.tokens_replayed == steps * len(open_choices)


@pytest.mark.parametrize("steps", range(STEPS))
async def test_a_group_may_lose_a_worker_at_every_step(steps: int) -> None:
    names = [f"both-{number}" for number in range(STEPS + 1)]
    scene, request, heard = Scene(*names, limit=STEPS), group(n=N, logprobs=1), Heard()
    stream = scene.router.generate(request)
    for step in range(STEPS):
        if step >= steps:
            for name in scene.writers():
                scene.kill(name)
        heard.take(await anext(stream), request)
    assert await heard.read(stream, request) == await undisturbed(request)
    assert scene.moves == {("died", "resumed"): STEPS - steps}


async def test_a_resumed_group_has_the_written_tokens_and_a_name_of_its_own() -> None:
    scene, request, heard = Scene("both-0", "both-1", "both-2"), group(n=N), Heard()
    whole = await undisturbed(request)
    stream = scene.router.generate(request)
    for _ in range(length(0)):
        heard.take(await anext(stream), request)
    scene.writer().die()
    heard.take(await anext(stream), request)
    scene.writer().die()
    await heard.read(stream, request)
    first, second, third = scene.asked
    assert first == request
    assert [one.request_id for one in (second, third)] == ["g.1", "g.2"]
    written = {start.index: list(start.output_tokens) for start in second.choices}
    assert written == {index: whole.tokens[index][: length(0)] for index in (1, 2)}  # choice 0 had finished
    written = {start.index: list(start.output_tokens) for start in third.choices}
    assert written == {index: whole.tokens[index][: length(0) + 1] for index in (1, 2)}
    assert [start.seed for start in third.choices] == [start.seed for start in request.choices[1:]]
    assert (third.prompt, third.sampling, third.trace) == (request.prompt, request.sampling, request.trace)


@pytest.mark.parametrize("steps", [0, 1, 3])
async def test_the_prompt_is_reported_once(steps: int) -> None:
    scene, request, heard = Scene("both-0", "both-1"), group(prompt_logprobs=0), Heard()
    whole = await undisturbed(request)
    stream = scene.router.generate(request)
    for _ in range(steps):
        heard.take(await anext(stream), request)
    scene.writer().die()
    await heard.read(stream, request)
    assert heard == whole
    (report,) = heard.prompts
    assert report.logprobs is not None
    assert len(report.logprobs) == len(request.prompt)
    # Nobody computes the rows of the prompt once more, since they were already reported.
    assert scene.asked[1].sampling.prompt_logprobs == (0 if steps == 0 else None)


@pytest.mark.parametrize("steps", [0, 1, 4])
async def test_the_groups_of_a_leaving_worker_go_on_elsewhere(steps: int) -> None:
    scene, request, heard = Scene("both-0", "both-1"), group(), Heard()
    stream = scene.router.generate(request)
    for _ in range(steps):
        heard.take(await anext(stream), request)
    (leaving,) = scene.writers()
    await scene.evict(leaving)
    assert scene.writers() == []
    assert await heard.read(stream, request) == await undisturbed(request)
    assert scene.moves == {("leaving", "resumed"): 1}


async def test_each_delta_after_a_move_names_its_worker() -> None:
    """The bug: choices that go on show something in different steps, and those behind the first seemed not to move."""
    scene, request = Scene("both-0", "both-1"), group()
    stream = scene.router.generate(request)
    first, second = await anext(stream), await anext(stream)
    (lost,) = scene.writers()
    scene.writer().die()
    moved = [delta.worker async for delta in stream]
    assert (first.worker, second.worker) == (lost, "")
    assert set(moved) == {"both-0", "both-1"} - {lost}


async def test_a_group_whose_worker_falls_silent_goes_on_elsewhere() -> None:
    scene, request, heard = Scene("both-0", "both-1"), group(), Heard()
    stream = scene.router.generate(request)
    heard.take(await anext(stream), request)
    scene.writer().die(EngineSilentError("no sign of life"))
    assert await heard.read(stream, request) == await undisturbed(request)
    assert scene.moves == {("silent", "resumed"): 1}


async def test_many_groups_of_one_worker_all_go_on() -> None:
    scene = Scene("both-0", "both-1", "both-2")
    requests = [group(f"g{number}", n=2) for number in range(12)]
    streams = [scene.router.generate(request) for request in requests]
    heards = [Heard() for _ in requests]
    for steps, (stream, heard, request) in enumerate(zip(streams, heards, requests, strict=True)):
        for _ in range(steps % 3):
            heard.take(await anext(stream), request)
    lost = len(scene.engines["both-1"].open)
    scene.kill("both-1")
    for stream, heard, request in zip(streams, heards, requests, strict=True):
        assert await heard.read(stream, request) == await undisturbed(request)
    assert lost > 1
    assert scene.moves == {("died", "resumed"): lost}


async def test_a_resumed_group_prefills_once_more_and_does_not_reuse_its_first_ticket() -> None:
    scene, request, heard = Scene("prefill-0", "decode-0", "decode-1"), group(), Heard()
    stream = scene.router.generate(request)
    heard.take(await anext(stream), request)
    scene.writer().die()
    assert await heard.read(stream, request) == await undisturbed(request)
    assert [one.request_id for one in scene.engines["prefill-0"].prefills] == ["g", "g.1"]
    tickets = [one.ticket and one.ticket.remote_request_id for one in scene.asked]
    assert tickets == ["g", "g.1"]
    assert set(scene.router.counts.bypasses.values()) == {0}


@pytest.mark.parametrize(("steps", "leases_left"), [(0, 1), (1, 0)])
async def test_a_ticket_of_the_client_is_dropped_when_its_group_moves(steps: int, leases_left: int) -> None:
    scene, heard = Scene("decode-0", "decode-1"), Heard()
    elsewhere = TransferAddress("elsewhere", "127.0.0.1", 1)
    ticket = scene.leases.grant(group(), elsewhere, readers=1, block_size=16)
    request = msgspec.structs.replace(group(), ticket=ticket)
    stream = scene.router.generate(request)
    for _ in range(steps):
        heard.take(await anext(stream), request)
    scene.writer().die()
    assert await heard.read(stream, request) == await undisturbed(group())
    assert [one.ticket for one in scene.asked] == [ticket, None]
    assert len(scene.leases.held) == leases_left  # a dead worker's lease is not given back: it ends by itself
    scene.leases.held.clear()


@pytest.mark.parametrize(("other", "told"), [("fake-same", "equal"), ("other-same", "other")])
async def test_the_log_tells_if_the_text_may_differ_after_a_move(
    other: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It used to go on with other weights without a word."""
    scene, request, heard = Scene("both-0", "both-1"), group(n=N), Heard()
    stream = scene.router.generate(request)
    heard.take(await anext(stream), request)
    (writer,) = scene.writers()
    (rest,) = {"both-0", "both-1"} - {writer}
    scene.engines[rest].info = msgspec.structs.replace(scene.engines[rest].info, fingerprint=other)
    scene.kill(writer)
    await heard.read(stream, request)
    (fields,) = [record.__dict__["fields"] for record in caplog.records if "continues on" in record.message]
    assert [fields[name] for name in ("fingerprint", "from", "to")] == [told, writer, rest]


async def test_each_worker_is_named_at_its_first_delta_and_after_a_move_only() -> None:
    """A worker may be a server with engines of its own, among which the group moves too."""
    there, here, request = Scene("both-0", "both-1"), Scene(), group(n=N)
    for name in ("server-0", "server-1"):
        here.fleet.put(Worker(name, there.router.placed(), "10.0.0.1:8000", local=False))
    stream = here.router.generate(request)
    deltas = [await anext(stream)]
    there.writer().die()
    deltas.append(await anext(stream))
    here.fleet.mark(first := deltas[0].worker, WorkerState.DRAINING)
    await here.evict(first)
    deltas += [delta async for delta in stream]
    second = {"server-0": "server-1", "server-1": "server-0"}[first]
    assert [delta.worker for delta in deltas] == [first, "", *[second] * (len(deltas) - 2)]
    assert len(there.asked) == 3
