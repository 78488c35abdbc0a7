"""Which decode replica a router takes, by what it knows of the replicas."""

from collections.abc import Mapping

import pytest

from motet.deploy.ray.asked import Asked
from motet.deploy.ray.balance import ON_THE_WAY_S, SESSION_SLACK, Balance, Record, record_of

TOLD: Mapping[str, Record | None] = {"a": None, "b": None}


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def told(**open_choices: tuple[int, int]) -> dict[str, Record | None]:
    """Number of the record and open choices, by replica."""
    return {id: Record(*both) for id, both in open_choices.items()}


def route(balance: Balance, request: str, asked: Asked, told: Mapping[str, Record | None] = TOLD) -> str:
    replica = balance.ranked(asked, told)[0]
    balance.book(request, replica, asked)
    return replica


def test_requests_count_by_their_choices() -> None:
    balance = Balance()
    large = route(balance, "large", Asked(choices=8))
    (other,) = TOLD.keys() - {large}
    assert [route(balance, f"small-{number}", Asked()) for number in range(8)] == [other] * 8


def test_a_request_that_is_over_counts_no_more() -> None:
    balance = Balance()
    large = route(balance, "large", Asked(choices=8))
    route(balance, "small", Asked(choices=2))
    balance.done("large")
    balance.done("large")
    balance.done("never routed")
    assert route(balance, "next", Asked()) == large


def test_what_others_have_there_counts_as_the_replica_told_last() -> None:
    balance = Balance()
    assert balance.ranked(Asked(), told(a=(1, 6), b=(1, 5)))[0] == "b"
    balance.book("mine", "b", Asked(choices=2))
    assert balance.ranked(Asked(), told(a=(1, 6), b=(1, 5)))[0] == "a"


def test_own_requests_are_not_counted_again_when_a_replica_tells_them() -> None:
    balance = Balance()
    balance.ranked(Asked(), told(a=(1, 0), b=(1, 0)))
    balance.book("mine", "a", Asked(choices=8))
    # 8 of a's 9 are known here already; b has 10 of others
    assert balance.ranked(Asked(), told(a=(2, 9), b=(2, 10)))[0] == "a"
    assert balance.ranked(Asked(), told(a=(3, 9), b=(3, 8)))[0] == "b"


def test_choices_that_no_header_told_are_seen_when_the_replica_tells_them() -> None:
    balance = Balance()
    balance.ranked(Asked(), told(a=(1, 0), b=(1, 0)))
    balance.book("eight, without a header", "a", Asked())
    balance.book("two", "b", Asked(choices=2))
    assert balance.ranked(Asked(), told(a=(1, 0), b=(1, 0)))[0] == "a"
    assert balance.ranked(Asked(), told(a=(2, 8), b=(2, 2)))[0] == "b"


def test_a_request_that_may_not_have_arrived_before_a_record_is_not_forgotten_for_it() -> None:
    balance = Balance()
    balance.ranked(Asked(), told(a=(1, 0), b=(1, 0)))
    balance.book("on its way", "a", Asked(choices=4))
    assert balance.ranked(Asked(), told(a=(2, 0), b=(2, 3)))[0] == "b"


def test_records_that_were_under_way_when_a_request_was_routed_do_not_make_it_forgotten() -> None:
    """Such as the first ones of a replica, which come several at a time."""
    clock = Clock()
    balance = Balance(clock=clock)
    assert route(balance, "eight", Asked(choices=8), {"a": None}) == "a"
    clock.now_s = ON_THE_WAY_S / 2
    for number in range(3, 6):
        assert balance.ranked(Asked(), told(a=(number, 0), b=(number, 7)))[0] == "b"


def test_a_request_whose_end_nobody_told_is_forgotten_when_the_replica_has_less() -> None:
    clock = Clock()
    balance = Balance(clock=clock)
    balance.ranked(Asked(), told(a=(1, 0), b=(1, 0)))
    balance.book("lost", "a", Asked(choices=4))
    balance.book("there", "a", Asked(choices=2))
    clock.now_s = ON_THE_WAY_S
    balance.ranked(Asked(), told(a=(2, 2), b=(2, 3)))
    assert balance.ranked(Asked(), told(a=(3, 2), b=(3, 3)))[0] == "a"
    assert (balance.replica_of("lost"), balance.replica_of("there")) == (None, "a")


def test_a_session_stays_where_it_was() -> None:
    balance = Balance()
    first = route(balance, "1", Asked("s"))
    for number in range(2, 6):
        assert route(balance, str(number), Asked("s")) == first


def test_a_session_leaves_a_replica_that_is_busier_than_the_least_by_more_than_the_slack() -> None:
    balance = Balance()
    balance.book("1", "a", Asked("s"))
    balance.done("1")
    balance.book("other", "a", Asked(choices=SESSION_SLACK))
    assert balance.ranked(Asked("s"), TOLD)[0] == "a"
    balance.book("one more", "a", Asked())
    assert balance.ranked(Asked("s"), TOLD)[0] == "b"


def test_a_session_is_forgotten_after_a_while() -> None:
    clock = Clock()
    balance = Balance(session_ttl_s=10, clock=clock)
    balance.book("1", "a", Asked("s"))
    balance.book("2", "b", Asked())
    balance.done("2")
    clock.now_s = 9.9
    assert balance.ranked(Asked("s"), TOLD)[0] == "a"
    clock.now_s = 10.0
    assert balance.ranked(Asked("s"), TOLD)[0] == "b"


def test_a_session_whose_replica_is_gone_goes_elsewhere() -> None:
    balance = Balance()
    balance.book("1", "a", Asked("s"))
    assert balance.ranked(Asked("s"), {"b": None}) == ["b"]
    balance.done("1")


def test_two_routers_begin_a_session_at_the_same_replica() -> None:
    one, two = Balance(), Balance()
    for number in range(20):
        asked = Asked(f"s{number}")
        assert one.ranked(asked, TOLD) == two.ranked(asked, TOLD)


def test_equal_replicas_all_get_their_share() -> None:
    balance = Balance()
    assert {balance.ranked(Asked(), TOLD)[0] for _ in range(50)} == {"a", "b"}


def test_a_request_that_went_elsewhere_counts_there() -> None:
    balance = Balance()
    balance.book("1", "a", Asked(choices=8))
    balance.book("1", "b", Asked(choices=8))
    assert (balance.replica_of("1"), balance.ranked(Asked(), TOLD)[0]) == ("b", "a")


@pytest.mark.parametrize(
    "stats",
    [
        {},
        None,
        [],
        {"record": "1", "open_choices": 2},
        {"record": 1},
        {"queue": 7},
        {"record": 1, "open_choices": None},
    ],
)
def test_stats_of_another_shape_say_nothing(stats: object) -> None:
    assert record_of(stats) is None


def test_stats_are_read_as_they_were_written() -> None:
    assert record_of(Record(3, 8).stats()) == Record(3, 8)
