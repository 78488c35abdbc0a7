"""Runs all of routing at once: groups wait, are split, prefilled and moved, on workers that die, leave and return in
any order."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from hypothesis import event
from hypothesis import strategies as st

from motet.engine import GroupStream, WorkerState
from motet.errors import (
    EngineClosedError,
    EngineDiedError,
    EngineError,
    MotetError,
    NoWorkerError,
    OverloadedError,
    WorkerLeavingError,
)
from motet.ids import ModelName
from tests.clock import settle
from tests.routing.scene import ANY_MODEL, Received, Scene, SlowPrefill, group, uninterrupted

LARGEST = 8
"""Maximum number of choices of a group."""
MAX_ROUNDS = 500
"""Number of rounds of reading after which every group must have ended."""
PROMPTS = (20, 200)
"""Numbers of prompt tokens; decode workers compute the shorter prompt themselves."""
WHOLE = asyncio.run(uninterrupted(group(n=LARGEST)))
MAY_END_A_GROUP = (EngineDiedError, NoWorkerError, WorkerLeavingError, OverloadedError, EngineClosedError)


class GroupReader:
    """The client of one group: reads it, stops choices of it and closes it."""

    def __init__(
        self, server: Scene, name: str, number: int, *, model: ModelName = ANY_MODEL, priority: int = 0
    ) -> None:
        n, prompt_tokens = 1 + number % LARGEST, PROMPTS[number // LARGEST % 2]
        request = group(name, n=n, prompt_tokens=prompt_tokens)
        self.request = msgspec.structs.replace(request, model=model, priority=priority)
        self.received = Received()
        self.error: MotetError | None = None
        self.over = False
        self.closed = False
        self.stopped: set[int] = set()
        self._server = server
        self._reading: asyncio.Task[None] | None = None
        self._others: list[asyncio.Task[None]] = []
        self._stream: GroupStream | None = None
        try:
            self._stream = server.router.generate(self.request)
        except MotetError as error:
            self.over, self.error = True, error

    def read(self) -> None:
        """Starts to read a delta, unless one is still awaited. Raises the error of the last one, if it was not
        correct."""
        if self._reading is not None and self._reading.done() and not self._reading.cancelled():
            self._reading.result()
        if not self.over and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._read())

    def cancel(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    def stop(self, index: int) -> None:
        self.stopped.add(index)
        self._others.append(asyncio.create_task(self._server.router.stop_choice(self.request.request_id, index)))

    def close(self) -> None:
        self.closed = True
        if self._stream is not None:
            self._others.append(asyncio.create_task(self._stream.aclose()))

    async def end(self) -> None:
        self.cancel()
        for task in [*self._others, *([self._reading] if self._reading else [])]:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def check(self) -> None:
        assert self.received.is_prefix_of(WHOLE)
        assert len(self.received.prompts) <= 1
        if self.error is not None:
            assert isinstance(self.error, MAY_END_A_GROUP)
            event(f"a group ended with {type(self.error).__name__}")
        elif not self.closed:
            choices = {start.index for start in self.request.choices}
            assert set(self.received.finished) | self.stopped >= choices

    async def _read(self) -> None:
        assert self._stream is not None  # otherwise `over` is True
        try:
            delta = await anext(self._stream)
        except StopAsyncIteration:
            self.over = True
        except MotetError as error:
            self.over, self.error = True, error
        else:
            self.received.take(delta, self.request)
            assert self.received.is_prefix_of(WHOLE)


class Play:
    """Groups on some workers, and the acts that happen to both."""

    def __init__(self, names: Sequence[str], server: Scene) -> None:
        """Makes a play with no groups yet. `names`: the workers of `server`."""
        self.names = names
        self.server = server
        self.readers: list[GroupReader] = []
        self.closed = False
        self.tasks: list[asyncio.Task[None]] = []

    def submit(self, number: int) -> None:
        self.readers.append(GroupReader(self.server, f"g{len(self.readers)}", number))

    async def act(self, acts: Sequence["Act"]) -> None:
        """Plays all acts, and then reads every group to its end."""
        for act in acts:
            ACTS[act.what](self, act.number)
            for _ in range(act.turns):
                await asyncio.sleep(0)
            self.check_capacity()
        await self.finish()

    def check_capacity(self) -> None:
        """Raises if a worker has more than it can hold. Called after each act; plays with small workers override it."""

    def reader(self, number: int) -> GroupReader:
        if not self.readers:
            self.submit(number)
        return self.readers[number % len(self.readers)]

    def name(self, number: int) -> str:
        return self.names[number % len(self.names)]

    def kill(self, name: str) -> None:
        self.server.engines[name].die()

    def report_death(self, name: str) -> None:
        if self.server.engines[name].death is not None:
            self.server.fleet.mark(name, WorkerState.DEAD)

    def offer(self, name: str, *, adapter: bool) -> None:
        """Loads the adapter on the worker or removes it. Plays with adapters override it."""

    def return_(self, name: str) -> None:
        engine = self.server.engines[name]
        if (engine.death is not None or not engine.open) and not self.closed:
            self.server.start(name)

    def fail_prefill(self) -> None:
        for name, engine in self.server.engines.items():
            if name.startswith("prefill"):
                engine.during_prefill = SlowPrefill(EngineError("broken"))

    def wait(self, seconds: int) -> None:
        self.server.clock.now_s += seconds
        self.server.fleet.changes.wake()

    def close(self) -> None:
        self.closed = True
        self.tasks.append(asyncio.create_task(self.server.router.close()))

    async def finish(self) -> None:
        """Restarts all workers and reads every group to its end, while time passes."""
        for name in self.names:
            self.server.engines[name].scenario.fail_after = {}
            if self.server.fleet.get(name) is None or self.server.engines[name].death is not None:
                self.return_(name)
            self.server.fleet.mark(name, WorkerState.READY)
        rounds = 0
        while not all(reader.over for reader in self.readers):
            rounds += 1
            assert rounds < MAX_ROUNDS, "a reader waits for ever"
            for reader in self.readers:
                reader.read()
            await settle()
            self.check_capacity()
            self.wait(1)
        for reader in self.readers:
            await reader.end()
            reader.check()
        await asyncio.gather(*self.tasks)
        self.check_figures()
        self.server.expire_leases_of_removed_workers()
        self.server.check()

    def check_figures(self) -> None:
        figures = self.server.router.figures()
        assert figures.queued == 0
        assert not any(figures.choices.values())
        if figures.spreads:
            event("a group was split")
        if sum(figures.queue_seconds[1:]):
            event("a group waited for capacity")
        if any(outcome == "resumed" for _, outcome in figures.migrations):
            event("a group moved")


@dataclass(frozen=True)
class Act:
    """`what` happens to the group or worker that `number` chooses; then the event loop turns `turns` times."""

    what: str
    number: int = 0
    turns: int = 1


ACTS: dict[str, Callable[[Play, int], None]] = {
    "a group comes": lambda play, number: play.submit(number),
    "read": lambda play, number: play.reader(number).read(),
    "cancel the reader": lambda play, number: play.reader(number).cancel(),
    "stop a choice": lambda play, number: play.reader(number).stop(number % LARGEST),
    "close a group": lambda play, number: play.reader(number).close(),
    "worker dies": lambda play, number: play.kill(play.name(number)),
    "fleet learns of it": lambda play, number: play.report_death(play.name(number)),
    "worker returns": lambda play, number: play.return_(play.name(number)),
    "worker leaves": lambda play, number: play.tasks.append(asyncio.create_task(play.server.leave(play.name(number)))),
    "worker refuses": lambda play, number: play.server.engines[play.name(number)].scenario.fail_after.update(
        {0: OverloadedError("full")}
    ),
    "adapter comes": lambda play, number: play.offer(play.name(number), adapter=True),
    "adapter goes": lambda play, number: play.offer(play.name(number), adapter=False),
    "prefill fails": lambda play, _: play.fail_prefill(),
    "time passes": lambda play, number: play.wait(number),
    "server closes": lambda play, _: play.close(),
}
ADAPTER_ACTS = ["adapter comes", "adapter goes"]
RARE = [what for what in ACTS if what not in ("server closes", *ADAPTER_ACTS)] * 2
OFTEN = ["a group comes"] * 6 + ["read"] * 24 + ["worker dies"] * 4 + ["worker returns"] * 4 + RARE + ["server closes"]
acts = st.builds(Act, st.sampled_from(OFTEN), st.integers(0, 15), st.integers(0, 6))
