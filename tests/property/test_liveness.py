"""The time at which an engine process counts as hung, whatever it and its parent do. No process is started and
nothing waits."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.engines.native.spawn import LivenessCheck, heartbeat_every_s

TICKS_PER_HEARTBEAT = 5
STEP_S = 300.0
Episode = tuple[int, bool, bool]
"""Number of ticks, True if the engine process runs during them, and True if its parent does."""
Ticks = st.integers(1, 400)
SILENCES = st.sampled_from([1.0, 2.0, 10.0, 60.0])


class World:
    """An engine that sends heartbeats and a parent that checks for them, as a clock ticks."""

    def __init__(self, silence_s: float) -> None:
        self.ticks = 0
        self.tick_s = heartbeat_every_s(silence_s) / TICKS_PER_HEARTBEAT
        self.liveness = LivenessCheck(silence_s, STEP_S, clock=lambda: self.ticks * self.tick_s)
        self._next_heartbeat = self._next_check = TICKS_PER_HEARTBEAT
        self._unread = 0

    def run(self, episodes: Iterable[Episode]) -> str | None:
        """Runs the episodes, and returns the first verdict, if there is one."""
        for ticks, engine, parent in episodes:
            for _ in range(ticks):
                if verdict := self._tick(engine=engine, parent=parent):
                    return verdict
        return None

    def _tick(self, *, engine: bool, parent: bool) -> str | None:
        """Runs one tick. A parent that wakes up checks before it reads, which is the worst case for the engine."""
        self.ticks += 1
        if engine and self.ticks >= self._next_heartbeat:
            self._next_heartbeat = self.ticks + TICKS_PER_HEARTBEAT
            self._unread += 1
        verdict = None
        if parent and self.ticks >= self._next_check:
            self._next_check = self.ticks + TICKS_PER_HEARTBEAT
            verdict = self.liveness.problem()
        if parent and self._unread:
            self._unread = 0
            self.liveness.record_event()
        return verdict


@given(SILENCES, st.lists(st.tuples(Ticks, st.booleans())))
def test_an_engine_with_heartbeats_is_never_killed_however_long_its_parent_stops(
    silence_s: float, episodes: list[tuple[int, bool]]
) -> None:
    assert World(silence_s).run((ticks, True, parent) for ticks, parent in episodes) is None


@given(SILENCES, st.lists(st.tuples(Ticks, st.booleans(), st.booleans())))
def test_a_machine_that_was_suspended_kills_no_engine_when_it_wakes_up(
    silence_s: float, episodes: list[tuple[int, bool, bool]]
) -> None:
    """The engine stops only while its parent does."""
    assert World(silence_s).run((ticks, engine or parent, parent) for ticks, engine, parent in episodes) is None


@given(SILENCES, st.lists(st.tuples(Ticks, st.booleans())))
def test_an_engine_that_stops_is_detected_soon_after_the_allowed_silence(
    silence_s: float, before: list[tuple[int, bool]]
) -> None:
    world = World(silence_s)
    world.run((ticks, True, parent) for ticks, parent in before)
    patience = round(silence_s / world.tick_s)
    assert world.run([(patience - TICKS_PER_HEARTBEAT, False, True)]) is None
    # It takes at most a late check, the check before it, and the ticks until the next check.
    assert "no heartbeat" in (world.run([(4 * TICKS_PER_HEARTBEAT, False, True)]) or "")


@given(st.lists(st.floats(0, STEP_S)))
def test_a_step_may_take_its_allowed_time_and_no_more(busy: list[float]) -> None:
    liveness = LivenessCheck(10.0, STEP_S, clock=lambda: 0.0)
    for busy_s in busy:
        liveness.record_event(busy_s)
        assert liveness.problem() is None
    liveness.record_event(STEP_S + 0.5)
    assert liveness.problem() == "has been in one step for 300.5 s"
    liveness.record_event()
    assert liveness.problem() is None


@pytest.mark.parametrize(("silence_s", "every_s"), [(1.0, 0.25), (2.0, 0.5), (60.0, 0.5)])
def test_several_heartbeats_fit_into_the_shortest_silence(silence_s: float, every_s: float) -> None:
    assert heartbeat_every_s(silence_s) == LivenessCheck(silence_s, STEP_S).check_every_s == every_s
