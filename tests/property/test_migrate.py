"""Groups on workers that die, leave, refuse and return in any order: nobody gets a token too many, too few or twice."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import event, given
from hypothesis import strategies as st

from motet.engines.base import WorkerState
from motet.errors import EngineClosedError, EngineDiedError, MotetError, OverloadedError, WorkerLeavingError
from tests.property_settings import examples
from tests.routing.moving import Heard, Scene, settle, undisturbed, wish

GROUPS = 2
CHOICES = 3
WHOLE = asyncio.run(undisturbed(wish(n=CHOICES, logprobs=1)))
MAY_END_A_GROUP = (EngineDiedError, WorkerLeavingError, OverloadedError, EngineClosedError)


class Reader:
    """Of one group. Whatever it got is, at every moment, what an undisturbed group begins with."""

    def __init__(self, scene: Scene, name: str) -> None:
        self.request = wish(name, n=CHOICES, logprobs=1)
        self.stream = scene.engine.generate(self.request)
        self.heard = Heard()
        self.error: MotetError | None = None
        self.over = False
        self.closed = False
        self.stopped: set[int] = set()
        self._scene = scene
        self._reading: asyncio.Task[None] | None = None
        self._others: list[asyncio.Task[None]] = []

    def read(self) -> None:
        """One delta, if none is being waited for. Raises what was wrong with the one before."""
        if self._reading is not None and self._reading.done() and not self._reading.cancelled():
            self._reading.result()
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read())

    def cancel(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    def stop(self, index: int) -> None:
        self.stopped.add(index)
        self._others.append(asyncio.create_task(self._scene.engine.stop_choice(self.request.request_id, index)))

    def close(self) -> None:
        self.closed = True
        self._others.append(asyncio.create_task(self.stream.aclose()))

    async def finish(self) -> None:
        """Reads to the end; time passes meanwhile."""
        while not self.over:
            self.read()
            await settle()
            self._scene.clock.now_s += 1.0
            self._scene.fleet.notify()
        self.cancel()
        for task in [*self._others, *([self._reading] if self._reading else [])]:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def check(self) -> None:
        assert self.heard.begins(WHOLE)
        assert len(self.heard.prompts) <= 1
        if self.error is not None:
            assert isinstance(self.error, MAY_END_A_GROUP)
        elif not self.closed:
            assert set(self.heard.finished) | self.stopped == set(range(CHOICES))

    async def _read(self) -> None:
        try:
            delta = await anext(self.stream)
        except StopAsyncIteration:
            self.over = True
        except MotetError as error:
            self.over, self.error = True, error
        else:
            self.heard.take(delta, self.request)
            assert self.heard.begins(WHOLE)


class Play:
    """Some groups on some workers, and what happens to both."""

    def __init__(self, *, apart: bool, workers: int, limit: int) -> None:
        decoding = [f"{'decode' if apart else 'both'}-{number}" for number in range(workers)]
        self.names = (["prefill-0"] if apart else []) + decoding
        self.scene = Scene(*self.names, limit=limit)
        self.readers = [Reader(self.scene, f"g{number}") for number in range(GROUPS)]
        self.closed = False
        self.tasks: list[asyncio.Task[None]] = []

    def reader(self, number: int) -> Reader:
        return self.readers[number % GROUPS]

    def name(self, number: int) -> str:
        return self.names[number % len(self.names)]

    def return_(self, name: str) -> None:
        """A worker whose engine has died, or has nothing left to do, comes back with another one."""
        engine = self.scene.engines[name]
        if (engine.death is not None or not engine.open) and not self.closed:
            self.scene.start(name)

    def tell(self, name: str) -> None:
        """Whoever keeps the worker notices that it died before any reader does."""
        if self.scene.engines[name].death is not None:
            self.scene.fleet.mark(name, WorkerState.DEAD)

    def leave(self, name: str) -> None:
        async def leave() -> None:
            await self.scene.evict(name)
            self.scene.fleet.remove(name)

        self.tasks.append(asyncio.create_task(leave()))

    def refuse(self, name: str) -> None:
        self.scene.engines[name].fail_after = {0: OverloadedError("full")}

    def wait(self, seconds: int) -> None:
        self.scene.clock.now_s += seconds
        self.scene.fleet.notify()

    def close(self) -> None:
        self.closed = True
        self.tasks.append(asyncio.create_task(self.scene.engine.close()))

    async def finish(self) -> None:
        """Everybody comes back, and every group that can be is read to its end."""
        for name in self.names:
            self.scene.engines[name].fail_after = {}
            if self.scene.fleet.get(name) is None or self.scene.engines[name].death is not None:
                self.return_(name)
            self.scene.fleet.mark(name, WorkerState.READY)
        for reader in self.readers:
            await reader.finish()
            reader.check()
        await asyncio.gather(*self.tasks)
        self.check_figures()
        self.expire_leases_of_those_who_left()
        self.scene.check()

    def expire_leases_of_those_who_left(self) -> None:
        """If nobody else was there either, they could not be told."""
        here = [member.worker.engine for member in self.scene.fleet.members if member.worker is not None]
        for engine in self.scene.all:
            if engine not in here and engine.info.transfer is not None:
                self.scene.leases.lose(engine.info.transfer.engine_id)

    def check_figures(self) -> None:
        """A group resumes at most as often as it was given to a worker, and loses its last one once."""
        figures = self.scene.engine.figures
        resumed = sum(times for (_, outcome), times in figures.moves.items() if outcome == "resumed")
        ended = sum(figures.moves.values()) - resumed
        assert resumed <= len(self.scene.asked)
        assert resumed <= figures.choices_resumed <= resumed * CHOICES
        assert ended <= GROUPS
        for outcome in {outcome for _, outcome in figures.moves}:
            event(f"a move ended as {outcome}")


@dataclass(frozen=True)
class Act:
    """`what` is done to a reader, a choice or a worker, chosen by `number`; then the loop turns."""

    what: str
    number: int = 0
    turns: int = 1


ACTS: dict[str, Callable[[Play, int], None]] = {
    "read": lambda play, number: play.reader(number).read(),
    "cancel the reader": lambda play, number: play.reader(number).cancel(),
    "stop a choice": lambda play, number: play.reader(number).stop(number % CHOICES),
    "close a group": lambda play, number: play.reader(number).close(),
    "worker dies": lambda play, number: play.scene.kill(play.name(number)),
    "fleet hears of it": lambda play, number: play.tell(play.name(number)),
    "worker returns": lambda play, number: play.return_(play.name(number)),
    "worker leaves": lambda play, number: play.leave(play.name(number)),
    "worker refuses": lambda play, number: play.refuse(play.name(number)),
    "time passes": lambda play, number: play.wait(number),
    "server closes": lambda play, _: play.close(),
}
OFTEN = ["read"] * 12 + ["worker dies"] * 3 + ["worker returns"] * 3 + list(ACTS)

acts = st.builds(Act, st.sampled_from(OFTEN), st.integers(0, 11), st.integers(0, 6))


@examples(250)
@given(
    acts=st.lists(acts, min_size=10, max_size=60),
    apart=st.booleans(),
    workers=st.integers(1, 4),
    limit=st.sampled_from([0, 1, 3, 1000]),
)
def test_what_each_reader_gets_is_what_an_undisturbed_group_begins_with(
    acts: list[Act], apart: bool, workers: int, limit: int
) -> None:
    async def play() -> None:
        scene = Play(apart=apart, workers=workers, limit=limit)
        for act in acts:
            ACTS[act.what](scene, act.number)
            for _ in range(act.turns):
                await asyncio.sleep(0)
        await scene.finish()

    asyncio.run(play())
