"""Groups of several models wait: each for workers of its model, and only after groups that need the same workers."""

import msgspec
import pytest

from motet.engine import GroupStream
from motet.ids import ModelName, RequestId
from motet.routing.queue.fair_queue import FairQueue
from tests.clock import settle
from tests.routing.kinds import ADAPTER, FRENCH, MAX_CHOICES, A, B, KindsScene
from tests.routing.scene import group

pytestmark = pytest.mark.anyio


def submit(server: KindsScene, name: str, model: ModelName, *, n: int) -> GroupStream:
    return server.router.generate(msgspec.structs.replace(group(name, n=n, prompt_tokens=20), model=model))


def waiting(server: KindsScene) -> int:
    return server.router.figures().queued


async def end(server: KindsScene, *streams: GroupStream) -> None:
    for stream in streams:
        await stream.aclose()
    server.fleet.capacity.wake()
    await settle()


async def test_a_full_model_does_not_delay_another() -> None:
    server = KindsScene("both-a-motet-0", "both-b-vllm-0")
    streams = [submit(server, f"a{number}", A, n=MAX_CHOICES) for number in range(2)]
    assert waiting(server) == 1
    server.clock.now_s += 10.0  # no group of its model can overtake the waiting one any more
    streams.append(submit(server, "b", B, n=2))
    assert (waiting(server), len(server.engines["both-b-vllm-0"].requests)) == (1, 1)
    streams.append(submit(server, "small", A, n=1))
    await settle()
    assert waiting(server) == 2
    await end(server, *streams)


async def test_groups_of_two_models_wait_independently_for_capacity_of_their_workers() -> None:
    server = KindsScene("both-a-motet-0", "both-b-vllm-0")
    first = {model: submit(server, f"first of {model}", model, n=MAX_CHOICES) for model in (A, B)}
    second = {model: submit(server, f"second of {model}", model, n=MAX_CHOICES) for model in (A, B)}
    await settle()
    server.clock.now_s += 10.0
    assert waiting(server) == 2
    await first[B].aclose()
    await settle()
    assert waiting(server) == 1
    assert len(server.engines["both-b-vllm-0"].requests) == 2
    await end(server, *second.values(), first[A])


async def test_an_adapter_needs_the_capacity_of_its_base_model_and_waits_its_turn() -> None:
    server = KindsScene("both-a-motet-0")
    server.offer("both-a-motet-0", ADAPTER)
    running = submit(server, "running", A, n=MAX_CHOICES)
    large = submit(server, "large", A, n=MAX_CHOICES)
    await settle()
    server.clock.now_s += 10.0
    small = submit(server, "small", FRENCH, n=1)
    await server.router.stop_choice(RequestId("running"), 0)
    await settle()
    assert [one.request_id for one in server.engines["both-a-motet-0"].requests] == ["running", "large"]
    assert waiting(server) == 1, "the choice that has ended was reserved for the large one"
    await end(server, small, large, running)


def queue_of(*lanes: str) -> FairQueue[str]:
    """Returns a queue in which a group waits for each of these models, in this order. No group fits at 0 s."""
    queue = FairQueue[str](max_wait_s=100.0, patience_s=1.0)
    for number, lane in enumerate(lanes):
        queue.push(f"{lane}{number}", choices=1, priority=0, now_s=0.0, lane=lane)
    assert queue.pop(lambda _: False, 0.0) is None
    return queue


async def test_capacity_is_reserved_for_the_longest_wait_and_lanes_that_share_it() -> None:
    queue = queue_of("a", "a", "b", "c")

    def with_b(one: str, other: str) -> bool:
        return {one, other} == {"a", "b"}

    assert queue.pop(lambda item: item != "a0", 2.0, share_capacity=with_b) == "c3"
    assert queue.pop(lambda item: item != "a0", 2.0, share_capacity=with_b) is None
    assert queue.pop(lambda item: item != "a0", 2.0, share_capacity=lambda *_: False) == "b2"
    assert list(queue.lanes) == ["a"]
    queue.remove("a0")
    assert queue.pop(lambda _: True, 2.0) == "a1"
    assert not queue.lanes
