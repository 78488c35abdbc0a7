"""Separate groups with one prompt: the router knows which prompts each worker computes, and lets the groups share
the work."""

import asyncio

import msgspec
import pytest

from motet.engine import Worker
from motet.errors import EngineError
from motet.ids import RequestId
from motet.routing.workers.serving import WorkKind
from motet.types import GenerateRequest
from tests.clock import settle
from tests.routing.cells import PairScene
from tests.routing.scene import APART, ControlledPrefill, Received, Scene, answers, answers_of, group, tokens_of

pytestmark = pytest.mark.anyio

LONG = 2000
"""Number of tokens of a prompt that costs more to compute than eight open choices on a worker cost."""


def of_one_prompt(count: int, *, prompt_tokens: int = 200) -> list[GenerateRequest]:
    one = group(n=1, prompt_tokens=prompt_tokens)
    return [msgspec.structs.replace(one, request_id=RequestId(f"g{number}")) for number in range(count)]


def requests_by_worker(scene: Scene) -> dict[str, int]:
    return {name: len(engine.requests) for name, engine in scene.engines.items()}


async def test_groups_that_arrive_at_once_are_prefilled_once_and_fetched_once() -> None:
    scene = Scene(*APART)
    requests = of_one_prompt(8, prompt_tokens=LONG)
    streams = [scene.router.generate(request) for request in requests]
    assert [await tokens_of(stream) for stream in streams] == [answers(1)] * 8
    assert len(scene.engines["prefill-0"].prefills) == 1
    assert sorted(requests_by_worker(scene).values()) == [0, 0, 8]
    assert sum(engine.record.pulls for engine in scene.all) == 1


async def test_without_capacity_another_worker_fetches_the_prompt_once_more() -> None:
    scene = Scene(*APART, max_choices=4)
    scene.gate(0)
    requests = of_one_prompt(8, prompt_tokens=LONG)
    streams = [scene.router.generate(request) for request in requests]
    await settle()
    assert len(scene.engines["prefill-0"].prefills) == 2
    assert [requests_by_worker(scene)[name] for name in ("decode-0", "decode-1")] == [4, 4]
    assert sum(request.ticket is not None for engine in scene.all for request in engine.requests) == 2
    for stream in streams:
        await stream.aclose()


@pytest.mark.parametrize("end", ["leaves", "fails"])
async def test_if_the_first_group_ends_in_its_prefill_the_next_one_is_prefilled(end: str) -> None:
    controlled = ControlledPrefill(error=EngineError("broken") if end == "fails" else None)
    scene = Scene(*APART)
    scene.engines["prefill-0"].during_prefill = controlled
    first, *others = of_one_prompt(4)
    leaving = scene.router.generate(first)
    streams = [scene.router.generate(request) for request in others]
    await controlled.entered.wait()
    await settle()
    assert len(scene.engines["prefill-0"].prefills) == 1
    if end == "leaves":
        await leaving.aclose()
    controlled.may_end.set()
    assert [await tokens_of(stream) for stream in streams] == [answers(1)] * 3
    assert (
        await Received().read(leaving, first) == Received()
        if end == "leaves"
        else await tokens_of(leaving) == answers(1)
    )


async def test_a_group_that_waits_for_its_turn_can_leave() -> None:
    controlled = ControlledPrefill()
    scene = Scene(*APART)
    scene.engines["prefill-0"].during_prefill = controlled
    streams = [scene.router.generate(request) for request in of_one_prompt(3)]
    await controlled.entered.wait()
    await streams[1].aclose()
    controlled.may_end.set()
    assert await tokens_of(streams[0]) == await tokens_of(streams[2]) == answers(1)


async def test_other_prompts_do_not_wait() -> None:
    controlled = ControlledPrefill()
    scene = Scene(*APART)
    scene.engines["prefill-0"].during_prefill = controlled
    slow = scene.router.generate(group("slow"))
    await controlled.entered.wait()
    scene.engines["prefill-0"].during_prefill = None
    assert await answers_of(scene.router, group("other")) == answers(2)
    controlled.may_end.set()
    assert await tokens_of(slow) == answers(2)


async def test_a_prompt_that_is_being_computed_is_not_counted_for_groups_that_join_it() -> None:
    """So a group joins it, unless the choices that are open there cost more than computing it on another worker."""
    pair = PairScene("decode")
    prompts = [group(name, n=1) for name in ("a", "b")]
    streams = [pair.router.generate(prompt) for prompt in prompts]
    for number in range(2):
        for prompt in prompts:
            again = msgspec.structs.replace(prompt, request_id=RequestId(f"{prompt.request_id}{number}"))
            streams.append(pair.router.generate(again))
    assert [len({request.prompt for request in engine.requests}) for engine in pair.all] == [1, 1]
    for member in pair.fleet.members:
        assert member.load.prompts.waiting_tokens == 200 + 2
        assert member.load.trunk_blocks == 13
    for stream in streams:
        await stream.aclose()


async def test_blocks_that_groups_share_are_counted_once_and_removed_with_the_last_group() -> None:
    scene = Scene("decode-0")
    load = scene.fleet.members[0].load
    long = group(prompt_tokens=100)
    common = msgspec.structs.replace(long, request_id=RequestId("common"), prompt=(*long.prompt[:64], 1, 2, 3))
    streams = [scene.router.generate(request) for request in (*of_one_prompt(2), long, common)]
    assert load.trunk_blocks == 13 + 1 + 1  # 200 tokens share 6 full blocks with 100, and 4 with 67
    assert len(scene.fleet.open_blocks) == 15
    for stream in streams:
        await stream.aclose()
    assert load.trunk_blocks == len(scene.fleet.open_blocks) == 0


async def test_groups_of_a_worker_s_former_start_take_nothing_from_its_next_one() -> None:
    scene = Scene("decode-0")
    gate = scene.gate(0)
    old = scene.router.generate(group("old", n=1))
    scene.start("decode-0").scenario.gate = gate
    again = msgspec.structs.replace(group("old", n=1), request_id=RequestId("new"))
    new = scene.router.generate(again)
    await old.aclose()
    assert len(scene.fleet.open_blocks) == 13
    load = scene.router.dispatcher.chooser.backlog(WorkKind.GENERATE, group("old"))
    assert load is not None and load.own_tokens == 1
    await new.aclose()
    assert len(scene.fleet.open_blocks) == 0


async def test_a_prompt_with_another_salt_is_another_prompt() -> None:
    scene = Scene("decode-0")
    first = scene.router.generate(group(n=1))
    salted = msgspec.structs.replace(group("salted", n=1), prompt=group().prompt, cache_salt="mine")
    loads = [scene.router.dispatcher.chooser.backlog(WorkKind.GENERATE, one) for one in (group(), salted)]
    assert [load and load.own_tokens for load in loads] == [1, 200]
    await first.aclose()


async def test_many_groups_of_one_prompt_end_at_any_moment_and_leave_nothing() -> None:
    scene = Scene(*APART, max_choices=4, queue_timeout_s=1000.0)
    streams = [scene.router.generate(request) for request in of_one_prompt(24)]
    leaving = [asyncio.ensure_future(stream.aclose()) for stream in streams[::3]]
    await asyncio.gather(*leaving)
    staying = [stream for number, stream in enumerate(streams) if number % 3]
    assert await asyncio.gather(*(tokens_of(stream) for stream in staying)) == [answers(1)] * len(staying)


async def test_after_a_failed_prefill_waiting_groups_are_prefilled_together() -> None:
    """A prefill worker that hangs delays each group by one time-out, not one group after the other."""
    scene = Scene(*APART, "decode-2", max_choices=1)
    failing, slow = ControlledPrefill(error=EngineError("broken")), ControlledPrefill()
    prefill = scene.engines["prefill-0"]
    prefill.during_prefill = failing
    streams = [scene.router.generate(request) for request in of_one_prompt(3)]
    await failing.entered.wait()
    prefill.during_prefill = slow
    failing.may_end.set()
    await settle()
    assert len(prefill.prefills) == 3
    slow.may_end.set()
    assert [await tokens_of(stream) for stream in streams] == [answers(1)] * 3


async def test_for_engines_that_share_no_prompts_each_group_is_prefilled() -> None:
    scene = Scene()
    for name in APART:
        engine = scene.start(name)
        engine.info = msgspec.structs.replace(engine.info, shares_prompts=False)
        scene.fleet.put(Worker(name, engine, "127.0.0.1:1"))
    streams = [scene.router.generate(request) for request in of_one_prompt(4)]
    await settle()
    assert len(scene.engines["prefill-0"].prefills) == 4
    assert sum(member.load.trunk_blocks for member in scene.fleet.members) == 4 * 13
    assert [await tokens_of(stream) for stream in streams] == [answers(1)] * 4
