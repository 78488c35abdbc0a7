"""Counters of engines never decrease, whatever happens to the engines. Lost engines are kept as a single sum."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.metrics.engines import EngineCounters, EngineSample
from motet.metrics.stats import EngineStats
from tests.metrics.shown import engine_sample

WORKERS = ("a", "b")


def counted(steps: int, **failures: int) -> EngineStats:
    """Returns the figures of an engine after some steps, each with a pull of a quarter of a second."""
    pulls = (steps, 0) if steps else ()
    return EngineStats(steps=steps, transfer_seconds=pulls, transfer_seconds_sum=steps / 4, transfer_failures=failures)


def test_a_silent_worker_keeps_its_last_figures_and_a_new_engine_adds_to_them() -> None:
    counters, first, second = EngineCounters(), object(), object()
    shown = []
    for engine, stats in (
        (first, counted(10, stale=1)),
        (first, None),
        (second, None),
        (second, counted(0)),
        (second, counted(4, late=2)),
    ):
        counters.note([engine_sample("a", stats, engine=engine)], sampled_s=0.0)
        shown.append(counters.of("a"))
    assert [one.steps for one in shown if one] == [10, 10, 10, 10, 14]
    last = shown[-1]
    assert last is not None and last == counters.total()
    assert (last.transfer_seconds, last.transfer_seconds_sum) == ((14, 0), 3.5)
    assert last.transfer_failures == {"stale": 1, "late": 2}


def test_a_worker_that_never_answered_has_counted_nothing() -> None:
    counters = EngineCounters()
    counters.note([engine_sample("a")], sampled_s=0.0)
    assert counters.of("a") is counters.total() is None


def test_late_answers_are_ignored() -> None:
    """A slow worker delays one scrape, and answers the next scrape before it."""
    counters, first, second = EngineCounters(), object(), object()
    counters.note([engine_sample("a", counted(6), engine=first)], sampled_s=1.0)
    counters.note([engine_sample("a", counted(3), engine=second)], sampled_s=3.0)
    counters.note([engine_sample("a", counted(8), engine=first), engine_sample("b", counted(1))], sampled_s=2.0)
    counters.note([engine_sample("a", counted(3), engine=second)], sampled_s=4.0)
    assert counters.total() == counters.of("a")
    assert (counters.of("a") or EngineStats()).steps == 9


def test_workers_that_come_and_go_leave_only_a_sum() -> None:
    counters = EngineCounters()
    for number in range(100):
        counters.note([engine_sample(f"worker-{number}", counted(2))], sampled_s=0.0)
    assert (counters.total() or EngineStats()).steps == 200
    assert [number for number in range(100) if counters.of(f"worker-{number}")] == [99]
    counters.note([], sampled_s=0.0)
    assert (counters.total() or EngineStats()).steps == 200


@dataclass(eq=False)
class Started:
    """One start of an engine."""

    worker: str
    written: int = 0
    read: int | None = None
    """Number of steps of the engine when it last answered."""
    left: bool = False
    """True if the worker has been missing in a scrape since."""


@dataclass
class Fleet:
    """A model of the counters: it keeps every engine that ever started, instead of sums."""

    engines: list[Started] = field(default_factory=list)
    there: dict[str, Started] = field(default_factory=dict)

    def start(self, worker: str) -> None:
        self.there[worker] = Started(worker)
        self.engines.append(self.there[worker])

    def leave(self, worker: str) -> None:
        self.there.pop(worker, None)

    def scrape(self, silent: str) -> list[EngineSample]:
        for engine in self.engines:
            engine.left = engine.left or engine.worker not in self.there
        for worker, engine in self.there.items():
            engine.read = engine.read if worker == silent else engine.written
        return [
            engine_sample(worker, None if worker == silent else counted(engine.written), engine=engine)
            for worker, engine in self.there.items()
        ]

    def steps(self, worker: str) -> int | None:
        """Returns the steps that a worker has reported since it was added; None if it has never answered."""
        return shown([one for one in self.engines if one.worker == worker and not one.left])


def shown(engines: list[Started]) -> int | None:
    read = [one.read for one in engines if one.read is not None]
    return sum(read) if read else None


def steps(stats: EngineStats | None) -> int | None:
    return None if stats is None else stats.steps


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "start", "leave"]),
        st.sampled_from(WORKERS),
        st.sampled_from(["nobody", "nobody", *WORKERS]),
    ),
    max_size=30,
)


@pytest.mark.slow
@given(EVENTS)
def test_whatever_happens_the_sums_are_those_of_all_engines_and_never_decrease(
    events: list[tuple[str, str, str]],
) -> None:
    counters, fleet, total = EngineCounters(), Fleet(), 0
    for number, (event, worker, silent) in enumerate(events):
        match event:
            case "write" if worker in fleet.there:
                fleet.there[worker].written += 1
            case "leave":
                fleet.leave(worker)
            case _:
                fleet.start(worker)
        counters.note(fleet.scrape(silent), sampled_s=number)
        assert {name: steps(counters.of(name)) for name in WORKERS} == {name: fleet.steps(name) for name in WORKERS}
        assert steps(counters.total()) == shown(fleet.engines)
        assert total <= (total := steps(counters.total()) or 0)
