"""Groups of several clients wait in a router: each client gets its share, and the figures show what it holds."""

import pytest

from motet.metrics.routing import with_client_names
from motet.routing.queue.fair_queue import MAX_DELAY_S, PATIENCE_S, ClientRules, FairQueue
from tests.clock import settle
from tests.routing.scene import ControlledPrefill, Scene, uninterrupted

pytestmark = pytest.mark.anyio


async def test_a_wide_group_next_to_a_stream_of_its_client_does_not_delay_another_client() -> None:
    scene = Scene("both-0", max_choices=8)
    submitted = [scene.submit("stream", 1, client="alpha"), scene.submit("wide", 8, client="alpha")]
    submitted.append(scene.submit("next wide", 8, client="alpha"))
    await scene.pass_time(0.0)
    await scene.pass_time(MAX_DELAY_S + PATIENCE_S)
    assert scene.started == ["stream", "wide"], "some choices of the wide group run"
    submitted += [scene.submit("tiny", 1, client="beta"), scene.submit("small", 3, client="beta")]
    await settle()
    assert scene.started == ["stream", "wide", "tiny", "small"]
    submitted.append(scene.submit("above", 1, client="beta"))
    await settle()
    assert len(scene.router.waiting) == 2, "beta has its half"
    for one in submitted:
        assert await one.read() == await uninterrupted(one.request)


async def test_many_prompts_of_a_client_do_not_delay_another_client() -> None:
    scene = Scene("both-0", max_choices=100, blocks=60)  # a prompt takes 13
    submitted = [scene.submit(f"g{number}", 1, client="alpha") for number in range(12)]
    await scene.pass_time(30.0)
    assert len(scene.router.waiting) == 8
    tiny = scene.submit("tiny", 2, client="beta")
    await settle()
    assert scene.started[-1] == "tiny"
    for one in (tiny, *submitted):
        await one.read()


async def test_choices_that_are_being_prefilled_belong_to_the_share_of_their_client() -> None:
    scene, controlled = Scene("prefill-0", "decode-0", max_choices=4), ControlledPrefill(held=False)
    scene.engines["prefill-0"].during_prefill = controlled
    full = scene.submit("full", 4, client="alpha")
    await full.step()
    controlled.may_end.clear()
    submitted = [scene.submit(name, 1, client="beta") for name in ("first", "second", "third")]
    await settle()
    assert [one.request_id for one in scene.engines["prefill-0"].prefills] == ["full", "first", "second"]
    assert len(scene.router.waiting) == 1
    controlled.may_end.set()
    for one in (full, *submitted):
        assert await one.read() == await uninterrupted(one.request)


@pytest.mark.parametrize(("client", "other"), [("alpha", "beta"), ("beta", "alpha")])
async def test_a_group_goes_to_the_worker_on_which_its_client_is_within_its_share(client: str, other: str) -> None:
    scene = Scene("both-0", "both-1", max_choices=4)
    submitted = [scene.submit(name, 4, client=name) for name in ("alpha", "beta")]
    submitted.append(scene.submit("small", 1, client=client))
    await settle()
    assert [other, "small"] in [[one.request_id for one in engine.requests] for engine in scene.all]
    for one in submitted:
        await one.read()


async def test_the_figures_show_what_each_client_holds_and_waits_for() -> None:
    scene = Scene("both-0", max_choices=4)
    submitted = [scene.submit("a", 4, client="alpha"), scene.submit("b", 3, client="alpha")]
    submitted += [scene.submit("c", 2, client="beta")]
    await settle()
    figures = scene.router.figures()
    assert figures.client_choices == {"alpha": 4, "beta": 2}
    assert figures.client_blocks == {"alpha": 13 + 4, "beta": 13 + 2}
    assert figures.client_queued_choices == {"alpha": 3}
    named = with_client_names(figures, {"alpha": "key-0", "gamma": "key-1"}, other="other")
    assert named.client_choices == {"key-0": 4, "key-1": 0, "other": 2}
    assert named.client_queued_choices == {"key-0": 3, "key-1": 0, "other": 0}
    for one in submitted:
        await one.read()
    assert scene.router.figures().client_choices == {}


def queue_of(**clients: int) -> FairQueue[str]:
    """Returns a queue with one group of each client, in this order, with this priority."""
    queue = FairQueue[str](max_wait_s=100.0, patience_s=1.0)
    for client, priority in clients.items():
        queue.push(client, choices=1, priority=priority, now_s=0.0, client=client)
    return queue


HELD = {"rich": 0.5, "poor": 0.1, "urgent": 0.9}


def rules(*in_share: str) -> ClientRules[str]:
    return ClientRules(held=lambda client, weight: HELD[client] / weight, in_share=lambda item: item in in_share)


async def test_the_priority_comes_before_what_a_client_holds() -> None:
    queue = queue_of(rich=0, poor=0, urgent=-1)
    assert [queue.pop(lambda _: True, 0.0, clients=rules()) for _ in range(3)] == ["urgent", "poor", "rich"]


async def test_what_a_client_holds_is_relative_to_its_weight() -> None:
    queue = FairQueue[str](max_wait_s=100.0)
    for client, weight in (("poor", 1.0), ("rich", 10.0)):
        queue.push(client, choices=1, priority=0, now_s=0.0, client=client, weight=weight)
    assert queue.pop(lambda _: True, 0.0, clients=rules()) == "rich"


async def test_capacity_is_reserved_against_groups_above_their_share_and_of_lower_priority() -> None:
    queue = queue_of(rich=0, poor=0)
    assert queue.pop(lambda _: False, 0.0, clients=rules()) is None
    assert queue.pop(lambda item: item == "rich", 2.0, clients=rules()) is None, "it would exceed its share"
    assert queue.pop(lambda _: False, 2.0, clients=rules("rich")) == "rich"
    queue = queue_of(urgent=-1, poor=0)
    assert queue.pop(lambda _: False, 0.0, clients=rules()) is None
    assert queue.pop(lambda _: False, 2.0, clients=rules("poor")) is None, "the first one has a higher priority"
