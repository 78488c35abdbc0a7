"""The decode replica that a router chooses, from the replicas' reports and the session of a request."""

from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace

import msgspec
import pytest

from motet.deploy.ray.balance import DELIVERY_S, SESSION_SLACK, LoadReport, ReplicaBalance, report_in, session_in
from motet.session_ids import SessionHeaders
from tests.clock import Clock

NO_REPORTS: Mapping[str, LoadReport | None] = {"a": None, "b": None}
NO_SESSION = ""


def reports(**reports: tuple[int, int]) -> dict[str, LoadReport | None]:
    """Number of the last report and of open choices, by replica."""
    return {id: LoadReport(*report) for id, report in reports.items()}


def route(
    balance: ReplicaBalance,
    request: str,
    *,
    session: str = NO_SESSION,
    reports: Mapping[str, LoadReport | None] = NO_REPORTS,
) -> str:
    replica = balance.ranked(session, reports)[0]
    balance.send(request, replica, session=session)
    return replica


def send_many(balance: ReplicaBalance, replica: str, number: int, *, name: str = "request") -> None:
    for i in range(number):
        balance.send(f"{name} {i}", replica, session=NO_SESSION)


def best(balance: ReplicaBalance, reports: Mapping[str, LoadReport | None] = NO_REPORTS, session: str = "") -> str:
    return balance.ranked(session, reports)[0]


def test_unfinished_requests_count() -> None:
    balance = ReplicaBalance()
    send_many(balance, "a", 8)
    assert [route(balance, f"next {number}") for number in range(8)] == ["b"] * 8


def test_a_finished_request_no_longer_counts() -> None:
    balance = ReplicaBalance()
    send_many(balance, "a", 2)
    send_many(balance, "b", 1, name="other")
    for request in ("request 0", "request 1", "request 1", "never sent"):
        balance.finish(request)
    assert best(balance) == "a"


def test_requests_of_other_routers_count_as_in_the_replicas_last_report() -> None:
    balance = ReplicaBalance()
    assert best(balance, reports(a=(1, 6), b=(1, 5))) == "b"
    send_many(balance, "b", 2)
    assert best(balance, reports(a=(1, 6), b=(1, 5))) == "a"


def test_own_requests_are_not_counted_twice_when_a_replica_reports_them() -> None:
    balance = ReplicaBalance()
    balance.ranked(NO_SESSION, reports(a=(1, 0), b=(1, 0)))
    send_many(balance, "a", 8)
    # 8 of the 9 choices on a are this router's own; b has 10 of other routers
    assert best(balance, reports(a=(2, 9), b=(2, 10))) == "a"
    assert best(balance, reports(a=(3, 9), b=(3, 8))) == "b"


def test_the_choices_of_a_request_count_when_the_replica_reports_them() -> None:
    balance = ReplicaBalance()
    balance.ranked(NO_SESSION, reports(a=(1, 0), b=(1, 0)))
    balance.send("eight choices", "a", session=NO_SESSION)
    send_many(balance, "b", 2)
    assert best(balance, reports(a=(1, 0), b=(1, 0))) == "a"
    assert best(balance, reports(a=(2, 8), b=(2, 2))) == "b"


def test_a_report_does_not_end_a_request_that_can_have_arrived_after_it() -> None:
    balance = ReplicaBalance()
    balance.ranked(NO_SESSION, reports(a=(1, 0), b=(1, 0)))
    send_many(balance, "a", 4)
    assert best(balance, reports(a=(2, 0), b=(2, 3))) == "b"


def test_reports_that_were_sent_before_a_request_arrived_do_not_end_it() -> None:
    """The first reports of a replica are such a case: several arrive together."""
    clock = Clock()
    balance = ReplicaBalance(clock=clock)
    for i in range(8):
        assert route(balance, f"request {i}", reports={"a": None}) == "a"
    clock.now_s += DELIVERY_S / 2
    for number in range(3, 6):
        assert best(balance, reports(a=(number, 0), b=(number, 7))) == "b"


def test_a_request_with_an_unreported_end_is_removed_when_the_replica_reports_less() -> None:
    clock = Clock()
    balance = ReplicaBalance(clock=clock)
    balance.ranked(NO_SESSION, reports(a=(1, 0), b=(1, 0)))
    send_many(balance, "a", 4, name="lost")
    send_many(balance, "a", 2, name="running")
    clock.now_s += DELIVERY_S
    balance.ranked(NO_SESSION, reports(a=(2, 2), b=(2, 3)))
    assert best(balance, reports(a=(3, 2), b=(3, 3))) == "a"
    assert [balance.replica_of(f"lost {i}") for i in range(4)] == [None] * 4
    assert [balance.replica_of(f"running {i}") for i in range(2)] == ["a"] * 2


def test_a_session_stays_at_its_replica() -> None:
    balance = ReplicaBalance()
    first = route(balance, "1", session="s")
    for number in range(2, 6):
        assert route(balance, str(number), session="s") == first


def test_a_session_leaves_a_replica_that_exceeds_the_least_busy_by_the_slack() -> None:
    balance = ReplicaBalance()
    balance.send("1", "a", session="s")
    balance.finish("1")
    send_many(balance, "a", SESSION_SLACK)
    assert best(balance, session="s") == "a"
    balance.send("one more", "a", session=NO_SESSION)
    assert best(balance, session="s") == "b"


def test_a_session_is_forgotten_after_a_while() -> None:
    clock = Clock()
    balance = ReplicaBalance(session_ttl_s=10, clock=clock)
    balance.send("1", "a", session="s")
    balance.send("2", "b", session=NO_SESSION)
    balance.finish("2")
    clock.now_s += 9.9
    assert best(balance, session="s") == "a"
    clock.now_s += 0.1
    assert best(balance, session="s") == "b"


def test_a_session_whose_replica_is_gone_gets_another_one() -> None:
    balance = ReplicaBalance()
    balance.send("1", "a", session="s")
    assert balance.ranked("s", {"b": None}) == ["b"]
    balance.finish("1")


def test_two_routers_start_a_session_at_the_same_replica() -> None:
    one, two = ReplicaBalance(), ReplicaBalance()
    for number in range(20):
        assert one.ranked(f"s{number}", NO_REPORTS) == two.ranked(f"s{number}", NO_REPORTS)


def test_equal_replicas_all_get_requests() -> None:
    balance = ReplicaBalance()
    assert {best(balance) for _ in range(50)} == {"a", "b"}


@pytest.mark.parametrize("num_replicas", [2, 3, 8])
@pytest.mark.parametrize("session", ["", "crew-{:05d}", "{}"])
def test_each_of_equal_replicas_is_first_for_an_equal_share_of_requests(num_replicas: int, session: str) -> None:
    """Within five standard deviations."""
    balance, total = ReplicaBalance(), 2000
    idle = {f"decode-{i:08x}": None for i in range(num_replicas)}
    first = Counter(best(balance, idle, session=session.format(i)) for i in range(total))
    fair = total / num_replicas
    assert all(abs(first[id] - fair) < 5 * fair**0.5 for id in idle), first


def test_a_request_that_was_sent_to_another_replica_counts_there() -> None:
    balance = ReplicaBalance()
    balance.send("1", "a", session=NO_SESSION)
    balance.send("1", "b", session=NO_SESSION)
    assert balance.replica_of("1") == "b"
    assert best(balance) == "a"


@pytest.mark.parametrize(
    "stats",
    [
        {},
        None,
        [],
        {"number": "1", "open_choices": 2},
        {"number": 1},
        {"queue": 7},
        {"number": 1, "open_choices": None},
    ],
)
def test_stats_of_another_shape_are_ignored(stats: object) -> None:
    assert report_in(stats) is None


def test_a_report_arrives_unchanged() -> None:
    assert report_in(msgspec.structs.asdict(LoadReport(3, 8))) == LoadReport(3, 8)


def test_the_session_of_a_call_is_in_the_headers_of_its_http_request() -> None:
    headers = SessionHeaders(["x-talk"])
    request = SimpleNamespace(asgi_scope={"headers": [(b"X-Talk", b"talk"), (b"x-dynamo-session-id", b"dynamo")]})
    assert session_in((b"body", request), headers) == "talk"
    for arguments in ((), (b"body",), (SimpleNamespace(asgi_scope=None),), (SimpleNamespace(asgi_scope={}),)):
        assert session_in(arguments, headers) == ""
