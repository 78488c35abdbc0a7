"""The affinity of sessions: the worker that each was last on."""

import pytest

from motet.routing.workers.affinity import MAX_SESSIONS, Affinity
from tests.clock import Clock


def test_a_session_is_at_the_worker_that_it_was_last_assigned_to() -> None:
    affinity = Affinity(clock=Clock())
    assert affinity.worker_of("s") is None
    affinity.record("s", "a")
    affinity.record("s", "b")
    affinity.record("t", "a")
    assert (affinity.worker_of("s"), affinity.worker_of("t")) == ("b", "a")


def test_an_idle_session_is_forgotten_after_its_time_and_not_before() -> None:
    clock = Clock(0.0)
    affinity = Affinity(clock=clock, ttl_s=10)
    affinity.record("s", "a")
    clock.now_s = 6
    affinity.record("t", "a")
    affinity.record("s", "a")
    clock.now_s = 15.9
    assert (affinity.worker_of("s"), affinity.worker_of("t")) == ("a", "a")
    clock.now_s = 16
    assert (affinity.worker_of("s"), affinity.worker_of("t")) == (None, None)


def test_looking_up_a_session_does_not_keep_it_longer() -> None:
    clock = Clock(0.0)
    affinity = Affinity(clock=clock, ttl_s=10)
    affinity.record("s", "a")
    clock.now_s = 9
    assert affinity.worker_of("s") == "a"
    clock.now_s = 10
    assert affinity.worker_of("s") is None


@pytest.mark.slow
def test_of_too_many_sessions_the_least_recently_used_is_forgotten() -> None:
    affinity = Affinity(clock=Clock())
    for session in ("s", "t", *map(str, range(MAX_SESSIONS - 2)), "s", "u"):
        affinity.record(session, {"s": "a", "u": "c"}.get(session, "b"))
    assert [affinity.worker_of(session) for session in "stu"] == ["a", None, "c"]


def test_the_sessions_of_a_worker_that_leaves_are_forgotten() -> None:
    affinity = Affinity(clock=Clock())
    affinity.record("s", "a")
    affinity.record("t", "b")
    affinity.record("u", "a")
    affinity.forget_worker("a")
    assert [affinity.worker_of(session) for session in "stu"] == [None, "b", None]


def test_requests_without_a_session_are_not_remembered() -> None:
    affinity = Affinity(clock=Clock())
    affinity.record("", "a")
    assert affinity.worker_of("") is None
