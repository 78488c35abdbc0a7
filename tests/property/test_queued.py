"""Groups of any size that come, are read, stopped and left in any order, on workers with few places."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from motet.errors import MotetError, OverloadedError
from tests.property_settings import examples
from tests.routing.moving import Heard, settle, undisturbed, wish
from tests.routing.queueing import Given, Queueing

pytestmark = pytest.mark.slow

PLACES = 4
LARGEST = 6
TIMEOUT_S = 10.0
WHOLE = asyncio.run(undisturbed(wish(n=LARGEST)))


class Play:
    """Some workers, and the groups that came so far."""

    def __init__(self, workers: int) -> None:
        self.scene = Queueing(*(f"both-{number}" for number in range(workers)), places=PLACES, timeout_s=TIMEOUT_S)
        self.groups: list[Given] = []
        self.ends: dict[int, list[MotetError | None]] = {}
        """By group, how it ended; once each."""
        self._reading: dict[int, asyncio.Task[None]] = {}

    def come(self, number: int) -> None:
        n, priority = 1 + number % LARGEST, number // LARGEST % 3 - 1
        self.groups.append(self.scene.give(f"g{len(self.groups)}", n, priority=priority))

    def read(self, number: int) -> None:
        """One delta, if none is being waited for."""
        if self.groups:
            place = number % len(self.groups)
            reading = self._reading.get(place)
            if place not in self.ends and (reading is None or reading.done()):
                self._reading[place] = asyncio.create_task(self._read(place))

    def stop(self, number: int) -> None:
        if self.groups:
            one = self.groups[number % len(self.groups)]
            self._reading[-1 - len(self._reading)] = asyncio.create_task(
                self.scene.queued.stop_choice(one.request.request_id, number % len(one.request.choices))
            )

    def leave(self, number: int) -> None:
        if self.groups:
            place = number % len(self.groups)
            self._reading[-1 - len(self._reading)] = asyncio.create_task(self.groups[place].stream.aclose())

    def wait(self, number: int) -> None:
        self.scene.clock.now_s += number / 4
        self.scene.fleet.notify_room()

    async def _read(self, place: int) -> None:
        try:
            await self.groups[place].step()
        except StopAsyncIteration:
            self.ends.setdefault(place, []).append(None)
        except MotetError as error:
            self.ends.setdefault(place, []).append(error)

    def check_room(self) -> None:
        """No worker has more than it can hold, but one group that is larger than any worker."""
        for engine in self.scene.all:
            open_choices = sum(len(group.unfinished) for group in engine.open.values())
            assert open_choices <= PLACES or len(engine.open) == 1

    async def finish(self) -> None:
        while len(self.ends) < len(self.groups):
            for place in range(len(self.groups)):
                self.read(place)
            await settle()
            self.check_room()
        await asyncio.gather(*self._reading.values())
        for place, one in enumerate(self.groups):
            assert one.heard.begins(WHOLE)
            (error,) = self.ends[place]
            if error is not None:
                assert isinstance(error, OverloadedError)
                assert one.heard == Heard()
                event("a group was refused")
        let_in = sum(len(engine.requests) for engine in self.scene.all)
        assert sum(self.scene.queued.waits) == let_in
        if let_in > self.scene.queued.waits[0]:
            event("a group waited")
        self.scene.check()


@dataclass(frozen=True)
class Act:
    """`what` happens to something chosen by `number`; then the loop turns."""

    what: str
    number: int = 0
    turns: int = 1


ACTS: dict[str, Callable[[Play, int], None]] = {
    "a group comes": Play.come,
    "read": Play.read,
    "stop a choice": Play.stop,
    "leave": Play.leave,
    "time passes": Play.wait,
}
OFTEN = ["a group comes"] * 5 + ["read"] * 12 + list(ACTS)
acts = st.builds(Act, st.sampled_from(OFTEN), st.integers(0, 17), st.integers(0, 5))


@examples(200)
@given(acts=st.lists(acts, min_size=10, max_size=80), workers=st.integers(1, 3))
def test_every_group_ends_once_and_no_worker_gets_more_than_it_can_hold(acts: list[Act], workers: int) -> None:
    async def play() -> None:
        scene = Play(workers)
        for act in acts:
            ACTS[act.what](scene, act.number)
            for _ in range(act.turns):
                await asyncio.sleep(0)
            scene.check_room()
        await scene.finish()

    asyncio.run(play())
