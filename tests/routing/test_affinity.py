"""On which worker a session was last."""

from motet.routing.affinity import MAX_SESSIONS, Affinity


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_session_is_where_it_was_given_to_last() -> None:
    affinity = Affinity(clock=Clock())
    assert affinity.worker_of("s") is None
    affinity.keep("s", "a")
    affinity.keep("s", "b")
    affinity.keep("t", "a")
    assert (affinity.worker_of("s"), affinity.worker_of("t")) == ("b", "a")


def test_a_silent_session_is_forgotten_when_its_time_is_over_and_not_before() -> None:
    clock = Clock()
    affinity = Affinity(clock=clock, ttl_s=10)
    affinity.keep("s", "a")
    clock.now_s = 6
    affinity.keep("t", "a")
    affinity.keep("s", "a")
    clock.now_s = 15.9
    assert (affinity.worker_of("s"), affinity.worker_of("t")) == ("a", "a")
    clock.now_s = 16
    assert (affinity.worker_of("s"), affinity.worker_of("t")) == (None, None)


def test_asking_does_not_lengthen_a_stay() -> None:
    clock = Clock()
    affinity = Affinity(clock=clock, ttl_s=10)
    affinity.keep("s", "a")
    clock.now_s = 9
    assert affinity.worker_of("s") == "a"
    clock.now_s = 10
    assert affinity.worker_of("s") is None


def test_of_too_many_the_one_silent_longest_is_forgotten() -> None:
    affinity = Affinity(clock=Clock())
    for session in ("s", "t", *map(str, range(MAX_SESSIONS - 2)), "s", "u"):
        affinity.keep(session, {"s": "a", "u": "c"}.get(session, "b"))
    assert [affinity.worker_of(session) for session in "stu"] == ["a", None, "c"]


def test_a_worker_that_leaves_takes_its_sessions_with_it() -> None:
    affinity = Affinity(clock=Clock())
    affinity.keep("s", "a")
    affinity.keep("t", "b")
    affinity.keep("u", "a")
    affinity.forget_worker("a")
    assert [affinity.worker_of(session) for session in "stu"] == [None, "b", None]


def test_requests_without_a_session_stay_nowhere() -> None:
    affinity = Affinity(clock=Clock())
    affinity.keep("", "a")
    assert affinity.worker_of("") is None
