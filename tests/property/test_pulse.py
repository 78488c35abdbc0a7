"""When an engine process counts as hung, whatever it and its parent do. No process is started and nothing waits."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.engines.native.spawn import LivenessCheck, beat_every_s

TICKS_A_BEAT = 5
STEP_S = 300.0
Episode = tuple[int, bool, bool]
"""Number of ticks, True if the engine process runs during them, and True if its parent does."""
Ticks = st.integers(1, 400)
SILENCES = st.sampled_from([1.0, 2.0, 10.0, 60.0])


class World:
    """An engine that beats and a parent that looks for beats, as a clock ticks."""

    def __init__(self, silence_s: float) -> None:
        self.ticks = 0
        self.tick_s = beat_every_s(silence_s) / TICKS_A_BEAT
        self.pulse = LivenessCheck(silence_s, STEP_S, clock=lambda: self.ticks * self.tick_s)
        self._next_beat = self._next_look = TICKS_A_BEAT
        self._unread = 0

    def run(self, episodes: Iterable[Episode]) -> str | None:
        """Plays the episodes, and returns the first verdict, if there is one."""
        for ticks, engine, parent in episodes:
            for _ in range(ticks):
                if verdict := self._tick(engine=engine, parent=parent):
                    return verdict
        return None

    def _tick(self, *, engine: bool, parent: bool) -> str | None:
        """Plays one tick. A parent that wakes up looks before it reads, which is worst for the engine."""
        self.ticks += 1
        if engine and self.ticks >= self._next_beat:
            self._next_beat = self.ticks + TICKS_A_BEAT
            self._unread += 1
        verdict = None
        if parent and self.ticks >= self._next_look:
            self._next_look = self.ticks + TICKS_A_BEAT
            verdict = self.pulse.look()
        if parent and self._unread:
            self._unread = 0
            self.pulse.heard()
        return verdict


@given(SILENCES, st.lists(st.tuples(Ticks, st.booleans())))
def test_an_engine_that_beats_is_never_killed_however_long_its_parent_stops(
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
def test_an_engine_that_stops_is_found_soon_after_the_allowed_silence(
    silence_s: float, before: list[tuple[int, bool]]
) -> None:
    world = World(silence_s)
    world.run((ticks, True, parent) for ticks, parent in before)
    patience = round(silence_s / world.tick_s)
    assert world.run([(patience - TICKS_A_BEAT, False, True)]) is None
    # It takes at most a look that came late, the one before it, and the ticks until the next one.
    assert "no sign of life" in (world.run([(4 * TICKS_A_BEAT, False, True)]) or "")


@given(st.lists(st.floats(0, STEP_S)))
def test_a_step_may_take_its_allowed_time_and_no_more(busy: list[float]) -> None:
    pulse = LivenessCheck(10.0, STEP_S, clock=lambda: 0.0)
    for busy_s in busy:
        pulse.heard(busy_s)
        assert pulse.look() is None
    pulse.heard(STEP_S + 0.5)
    assert pulse.look() == "has been in one step for 300.5 s"
    pulse.heard()
    assert pulse.look() is None


@pytest.mark.parametrize(("silence_s", "every_s"), [(1.0, 0.25), (2.0, 0.5), (60.0, 0.5)])
def test_several_beats_fit_into_the_shortest_silence(silence_s: float, every_s: float) -> None:
    assert beat_every_s(silence_s) == LivenessCheck(silence_s, STEP_S).look_every_s == every_s
