"""Workers with the same model name but other weights never continue each other's groups."""

import asyncio
from collections.abc import Mapping

import msgspec
import pytest

from motet.engine import WorkerState
from motet.errors import EngineDiedError, NoWorkerError
from motet.routing.groups.unfinished import Unfinished
from motet.types import GenerateRequest
from tests.clock import settle
from tests.routing.scene import ControlledEngine, Received, Scene, group, uninterrupted

pytestmark = pytest.mark.anyio

OLD, NEW, UNKNOWN = "01d", "2e3", ""


class WeightsScene(Scene):
    """A scene of workers, each with the digest of its weights."""

    def __init__(self, digests: Mapping[str, str], **options: float) -> None:
        self.digests = digests
        super().__init__(*digests, **options)  # type: ignore[arg-type]

    def make_engine(self, name: str) -> ControlledEngine:
        engine = super().make_engine(name)
        engine.info = msgspec.structs.replace(engine.info, model_digest=self.digests[name])
        return engine

    async def start_on_both_0(
        self, request: GenerateRequest, received: Received, *, steps: int = 1
    ) -> asyncio.Future[Received]:
        """Lets `both-0` take this number of steps of a group, and kills it."""
        for name in self.engines:
            self.fleet.mark(name, WorkerState.READY if name == "both-0" else WorkerState.DRAINING)
        stream = self.router.generate(request)
        for _ in range(steps):
            received.take(await anext(stream), request)
        for name in self.engines:
            self.fleet.mark(name, WorkerState.READY)
        self.kill("both-0")
        reading = asyncio.ensure_future(received.read(stream, request))
        await settle()
        return reading


async def test_a_group_continues_only_with_the_weights_with_which_it_started() -> None:
    """It used to continue with other weights: the answer started as one model's and ended as another's."""
    scene, request = WeightsScene({"both-0": OLD, "both-1": NEW, "both-2": NEW, "both-3": OLD}), group()
    for _ in range(3):  # no matter which worker has the next turn
        reading = await scene.start_on_both_0(request, Received())
        assert await reading == await uninterrupted(request)
        assert [engine.requests for engine in scene.engines.values()][1:3] == [[], []]
        scene.start("both-0")
    scene.check()


async def test_if_only_other_weights_are_left_a_group_waits_as_without_a_worker() -> None:
    scene, request = WeightsScene({"both-0": OLD, "both-1": NEW}), group()
    reading = await scene.start_on_both_0(request, Received(), steps=2)
    assert not reading.done()
    with pytest.raises(NoWorkerError, match=r"both-0 is dead, both-1 is ready with other weights$"):
        scene.router.dispatcher.place(msgspec.structs.replace(request, model_digest=OLD), Unfinished(request))
    scene.start("both-0")
    assert await reading == await uninterrupted(request)
    assert [one.model_digest for one in scene.requests] == ["", OLD]
    assert scene.moves == {("died", "resumed"): 1}
    scene.check()


async def test_without_its_weights_in_time_a_group_ends_with_its_lost_workers_error() -> None:
    scene = WeightsScene({"both-0": OLD, "both-1": NEW}, wait_s=0.0)
    with pytest.raises(EngineDiedError):
        await (await scene.start_on_both_0(group(), Received()))
    assert scene.moves == {("died", "no-worker"): 1}
    assert scene.engines["both-1"].requests == []
    scene.check()


@pytest.mark.parametrize(
    ("first", "second", "steps"),
    [(OLD, UNKNOWN, 1), (UNKNOWN, NEW, 1), (OLD, NEW, 0)],
    ids=["to", "from", "not-started"],
)
async def test_unknown_weights_and_groups_without_tokens_do_not_prevent_a_move(
    first: str, second: str, steps: int
) -> None:
    scene, request = WeightsScene({"both-0": first, "both-1": second}), group()
    reading = await scene.start_on_both_0(request, Received(), steps=steps)
    assert await reading == await uninterrupted(request)
    assert scene.moves == {("died", "resumed"): 1}
    scene.check()


async def test_weights_are_remembered_across_a_worker_that_does_not_report_them() -> None:
    scene, request, received = (
        WeightsScene({"both-0": OLD, "both-1": UNKNOWN, "both-2": NEW}, wait_s=0.0),
        group(),
        Received(),
    )
    scene.fleet.mark("both-2", WorkerState.DEAD)
    scene.gate(2)
    reading = await scene.start_on_both_0(request, received)
    assert scene.generating() == ["both-1"]
    scene.fleet.mark("both-2", WorkerState.READY)
    scene.kill("both-1")
    with pytest.raises(EngineDiedError):
        await reading
    assert scene.engines["both-2"].requests == []
    scene.check()


async def test_prefill_uses_the_same_weights_too() -> None:
    digests = {"prefill-0": NEW, "prefill-1": OLD, "both-0": OLD, "decode-1": NEW, "decode-2": OLD}
    scene, request = WeightsScene(digests), group()
    reading = await scene.start_on_both_0(request, Received())
    assert await reading == await uninterrupted(request)
    assert [len(scene.engines[name].prefills) for name in ("prefill-0", "prefill-1")] == [0, 1]
    assert scene.engines["decode-1"].requests == []
    assert scene.engines["decode-2"].requests[0].ticket is not None
    scene.check()
