"""The decode replica that a router chooses, by what it knows of replicas and of a request whose body is yet to come."""

import pickle  # noqa: TID251  as Serve's proxy hands a request to its router
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import pytest

from motet.deploy.ray.balance import (
    ON_THE_WAY_S,
    SESSION_SLACK,
    Record,
    ReplicaBalance,
    RequestHeaders,
    asked_of,
    choices_in,
    named_in,
    record_of,
)
from tests.deploy.ray.directories import Clock

TOLD: Mapping[str, Record | None] = {"a": None, "b": None}


def told(**open_choices: tuple[int, int]) -> dict[str, Record | None]:
    """Number of the last record and of open choices, by replica."""
    return {id: Record(*both) for id, both in open_choices.items()}


def route(
    balance: ReplicaBalance, request: str, asked: RequestHeaders, told: Mapping[str, Record | None] = TOLD
) -> str:
    replica = balance.ranked(asked, told)[0]
    balance.book(request, replica, asked=asked)
    return replica


def test_requests_count_by_their_choices() -> None:
    balance = ReplicaBalance()
    large = route(balance, "large", RequestHeaders(choices=8))
    (other,) = TOLD.keys() - {large}
    assert [route(balance, f"small-{number}", RequestHeaders()) for number in range(8)] == [other] * 8


def test_a_finished_request_no_longer_counts() -> None:
    balance = ReplicaBalance()
    large = route(balance, "large", RequestHeaders(choices=8))
    route(balance, "small", RequestHeaders(choices=2))
    balance.done("large")
    balance.done("large")
    balance.done("never routed")
    assert route(balance, "next", RequestHeaders()) == large


def test_requests_of_other_routers_count_as_the_replica_reported_last() -> None:
    balance = ReplicaBalance()
    assert balance.ranked(RequestHeaders(), told(a=(1, 6), b=(1, 5)))[0] == "b"
    balance.book("mine", "b", asked=RequestHeaders(choices=2))
    assert balance.ranked(RequestHeaders(), told(a=(1, 6), b=(1, 5)))[0] == "a"


def test_own_requests_are_not_counted_twice_when_a_replica_reports_them() -> None:
    balance = ReplicaBalance()
    balance.ranked(RequestHeaders(), told(a=(1, 0), b=(1, 0)))
    balance.book("mine", "a", asked=RequestHeaders(choices=8))
    # 8 of a's 9 are this router's own; b has 10 of others
    assert balance.ranked(RequestHeaders(), told(a=(2, 9), b=(2, 10)))[0] == "a"
    assert balance.ranked(RequestHeaders(), told(a=(3, 9), b=(3, 8)))[0] == "b"


def test_choices_without_a_header_count_once_the_replica_reports_them() -> None:
    balance = ReplicaBalance()
    balance.ranked(RequestHeaders(), told(a=(1, 0), b=(1, 0)))
    balance.book("eight, without a header", "a", asked=RequestHeaders())
    balance.book("two", "b", asked=RequestHeaders(choices=2))
    assert balance.ranked(RequestHeaders(), told(a=(1, 0), b=(1, 0)))[0] == "a"
    assert balance.ranked(RequestHeaders(), told(a=(2, 8), b=(2, 2)))[0] == "b"


def test_a_record_does_not_forget_a_request_that_may_have_arrived_after_it() -> None:
    balance = ReplicaBalance()
    balance.ranked(RequestHeaders(), told(a=(1, 0), b=(1, 0)))
    balance.book("on its way", "a", asked=RequestHeaders(choices=4))
    assert balance.ranked(RequestHeaders(), told(a=(2, 0), b=(2, 3)))[0] == "b"


def test_records_under_way_when_a_request_was_routed_do_not_forget_it() -> None:
    """The first records of a replica are such a case: several come at a time."""
    clock = Clock()
    balance = ReplicaBalance(clock=clock)
    assert route(balance, "eight", RequestHeaders(choices=8), {"a": None}) == "a"
    clock.now_s += ON_THE_WAY_S / 2
    for number in range(3, 6):
        assert balance.ranked(RequestHeaders(), told(a=(number, 0), b=(number, 7)))[0] == "b"


def test_a_request_whose_end_got_lost_is_forgotten_when_the_replica_reports_less() -> None:
    clock = Clock()
    balance = ReplicaBalance(clock=clock)
    balance.ranked(RequestHeaders(), told(a=(1, 0), b=(1, 0)))
    balance.book("lost", "a", asked=RequestHeaders(choices=4))
    balance.book("there", "a", asked=RequestHeaders(choices=2))
    clock.now_s += ON_THE_WAY_S
    balance.ranked(RequestHeaders(), told(a=(2, 2), b=(2, 3)))
    assert balance.ranked(RequestHeaders(), told(a=(3, 2), b=(3, 3)))[0] == "a"
    assert (balance.replica_of("lost"), balance.replica_of("there")) == (None, "a")


def test_a_session_stays_where_it_was() -> None:
    balance = ReplicaBalance()
    first = route(balance, "1", RequestHeaders("s"))
    for number in range(2, 6):
        assert route(balance, str(number), RequestHeaders("s")) == first


def test_a_session_leaves_a_replica_that_exceeds_the_least_busy_by_the_slack() -> None:
    balance = ReplicaBalance()
    balance.book("1", "a", asked=RequestHeaders("s"))
    balance.done("1")
    balance.book("other", "a", asked=RequestHeaders(choices=SESSION_SLACK))
    assert balance.ranked(RequestHeaders("s"), TOLD)[0] == "a"
    balance.book("one more", "a", asked=RequestHeaders())
    assert balance.ranked(RequestHeaders("s"), TOLD)[0] == "b"


def test_a_session_is_forgotten_after_a_while() -> None:
    clock = Clock()
    balance = ReplicaBalance(session_ttl_s=10, clock=clock)
    balance.book("1", "a", asked=RequestHeaders("s"))
    balance.book("2", "b", asked=RequestHeaders())
    balance.done("2")
    clock.now_s += 9.9
    assert balance.ranked(RequestHeaders("s"), TOLD)[0] == "a"
    clock.now_s += 0.1
    assert balance.ranked(RequestHeaders("s"), TOLD)[0] == "b"


def test_a_session_whose_replica_is_gone_goes_elsewhere() -> None:
    balance = ReplicaBalance()
    balance.book("1", "a", asked=RequestHeaders("s"))
    assert balance.ranked(RequestHeaders("s"), {"b": None}) == ["b"]
    balance.done("1")


def test_two_routers_begin_a_session_at_the_same_replica() -> None:
    one, two = ReplicaBalance(), ReplicaBalance()
    for number in range(20):
        asked = RequestHeaders(f"s{number}")
        assert one.ranked(asked, TOLD) == two.ranked(asked, TOLD)


def test_equal_replicas_all_get_their_share() -> None:
    balance = ReplicaBalance()
    assert {balance.ranked(RequestHeaders(), TOLD)[0] for _ in range(50)} == {"a", "b"}


def test_a_request_that_went_elsewhere_counts_there() -> None:
    balance = ReplicaBalance()
    balance.book("1", "a", asked=RequestHeaders(choices=8))
    balance.book("1", "b", asked=RequestHeaders(choices=8))
    assert (balance.replica_of("1"), balance.ranked(RequestHeaders(), TOLD)[0]) == ("b", "a")


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
def test_stats_of_another_shape_are_ignored(stats: object) -> None:
    assert record_of(stats) is None


def test_stats_are_read_as_they_were_written() -> None:
    assert record_of(msgspec.structs.asdict(Record(3, 8))) == Record(3, 8)


@pytest.mark.parametrize(
    ("text", "choices"),
    [("8", 8), ("1", 1), ("", 1), ("0", 1), ("-3", 1), ("many", 1), ("2.5", 1), ("٣", 1), ("9" * 30, 1)],
)
def test_a_header_that_is_no_number_of_choices_counts_as_one(text: str, choices: int) -> None:
    assert choices_in(text) == choices


@dataclass
class PickledRequest:
    """The parts that are read of what the proxy pickles."""

    asgi_scope: dict[str, object]


def scope(*headers: tuple[bytes, bytes]) -> bytes:
    return pickle.dumps(PickledRequest({"headers": list(headers)}))


def test_choices_and_session_are_read_from_headers_however_they_are_written() -> None:
    headers = scope((b"Host", b"x"), (b"X_Motet_Choices", b"8"), (b"X-SESSION_ID", b"s"))
    assert asked_of([headers], "") == RequestHeaders("s", 8)
    assert asked_of([scope((b"x-session-id", b"other"))], "of Serve") == RequestHeaders("of Serve", 1)


@pytest.mark.parametrize("args", [(), (b"no pickle",), (pickle.dumps({"headers": 1}),), (7, "x"), ("replica-1",)])
def test_a_request_that_cannot_be_read_has_one_choice(args: tuple[object, ...]) -> None:
    assert asked_of(args, "") == RequestHeaders()


def test_the_hook_names_a_replica() -> None:
    assert named_in(["replica-1"]) == "replica-1"
    assert named_in([""]) == ""
    assert named_in([]) is named_in([b"scope"]) is None
