"""Signs of life for leases of others."""

from motet.transfer.heartbeats import LONGEST_S, SHORTEST_S, Heartbeats, lease_of
from motet.transfer.ticket import Ticket, TransferAddress
from tests.transfer.clock import Clock
from tests.transfer.worker import ticket_at

OWNER = TransferAddress("p", "127.0.0.1", 1)


def ticket(lease_s: float = 60.0) -> Ticket:
    return ticket_at(OWNER, lease_s=lease_s)


def test_three_beats_a_lease_the_first_at_once_until_nobody_holds_the_ticket() -> None:
    clock = Clock()
    beats = Heartbeats(clock)
    assert (beats.due(), beats.next_s) == ([], None)

    beats.begin(ticket(lease_s=60.0))
    assert beats.due() == [lease_of(ticket())]
    assert beats.due() == []
    assert beats.next_s == clock.now_s + 20.0

    clock.now_s += 20.0
    assert beats.due() == [lease_of(ticket())]

    beats.end(ticket())
    clock.now_s += 20.0
    assert beats.due() == []
    assert beats.next_s is None


def test_two_groups_with_one_ticket_keep_the_lease_until_both_are_done() -> None:
    beats = Heartbeats(Clock())
    beats.begin(ticket())
    beats.begin(ticket())
    beats.end(ticket())
    assert beats.due() == [lease_of(ticket())]
    assert beats.end_all() == [lease_of(ticket())]
    assert beats.next_s is None


def test_the_end_of_a_ticket_that_never_began_changes_nothing() -> None:
    beats = Heartbeats(Clock())
    beats.end(ticket())
    assert beats.end_all() == []


def test_a_ticket_cannot_ask_for_a_flood_nor_for_silence() -> None:
    for asked_s, every_s in ((0.0, SHORTEST_S), (-5.0, SHORTEST_S), (float("nan"), SHORTEST_S), (1e12, LONGEST_S)):
        clock = Clock()
        beats = Heartbeats(clock)
        beats.begin(ticket(lease_s=asked_s))
        beats.due()
        assert beats.next_s == clock.now_s + every_s, asked_s
