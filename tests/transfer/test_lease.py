"""Leases at both ends: the owner keeps blocks as long as it promised and gives them back once; readers send signs of
life."""

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from motet.transfer.lease import LONGEST_S, SHORTEST_S, Heartbeats, Lease, LeaseTable
from motet.transfer.proof import Proof
from tests.property_settings import examples
from tests.transfer.scripted import Clock
from tests.transfer.worker import NOWHERE, granted, ticket_at

SECONDS = 60.0
READERS = ["decode-0", "decode-1", "decode-2"]


@dataclass
class Promise:
    """The model's record of a lease."""

    lease: Lease
    waiting_for: int
    ends_s: float
    done: set[str] = field(default_factory=set)


class TableAgainstPromises(RuleBasedStateMachine):
    @initialize()
    def make(self) -> None:
        self.proof = Proof(100)
        self.table = LeaseTable(self.proof, seconds=SECONDS)
        self.held: dict[int, Promise] = {}
        self.over: list[int] = []
        self.now_s = 0.0

    def some_lease(self, data: st.DataObject) -> int:
        """Returns the id of a lease that is held, over, or was never granted."""
        return data.draw(st.sampled_from([*self.held, *self.over, 1]))

    def ends(self, lease_id: int, given_back: Lease | None) -> None:
        promise = self.held.pop(lease_id)
        assert given_back is promise.lease
        self.over.append(lease_id)

    @rule(blocks=st.lists(st.integers(0, 99), unique=True, min_size=1), readers=st.integers(1, 3))
    def grant(self, blocks: list[int], readers: int) -> None:
        name = f"group-{len(self.held) + len(self.over)}"
        lease = granted(self.table, self.proof, blocks, now_s=self.now_s, readers=readers, remote_request_id=name)
        lease_id = lease.ticket.lease_id
        assert lease_id not in self.held and lease_id not in self.over
        self.held[lease_id] = Promise(lease, readers, self.now_s + SECONDS)

    @rule(data=st.data(), reader=st.sampled_from(READERS))
    def a_reader_is_done(self, data: st.DataObject, reader: str) -> None:
        lease_id = self.some_lease(data)
        given_back = self.table.reader_done(lease_id, reader)
        promise = self.held.get(lease_id)
        if promise is None:
            assert given_back is None
            return
        promise.done.add(reader)
        if len(promise.done) < promise.waiting_for:
            assert given_back is None
        else:
            self.ends(lease_id, given_back)

    @rule(data=st.data())
    def a_reader_waits(self, data: st.DataObject) -> None:
        lease_id = self.some_lease(data)
        self.table.reader_waits(lease_id, self.now_s)
        if lease_id in self.held:
            self.held[lease_id].ends_s = self.now_s + SECONDS

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        lease_id = self.some_lease(data)
        given_back = self.table.end(lease_id)
        if lease_id in self.held:
            self.ends(lease_id, given_back)
        else:
            assert given_back is None

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def the_group_goes(self, data: st.DataObject) -> None:
        promise = data.draw(st.sampled_from(list(self.held.values())))
        ticket = promise.lease.ticket
        self.ends(ticket.lease_id, self.table.end_of_request(ticket.remote_request_id))
        assert self.table.end_of_request(ticket.remote_request_id) is None

    @rule(seconds=st.sampled_from([0.0, 1.0, 30.0, 59.0, 60.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        due = {lease_id for lease_id, promise in self.held.items() if promise.ends_s <= self.now_s}
        next_s = self.table.next_end_s()
        assert next_s == min((promise.ends_s for promise in self.held.values()), default=None)
        expired = self.table.expired(self.now_s)
        assert {lease.ticket.lease_id for lease in expired} == due
        for lease in expired:
            self.ends(lease.ticket.lease_id, lease)

    @invariant()
    def books_and_proof_say_the_same(self) -> None:
        self.table.check()
        assert len(self.table) == len(self.held)
        tickets = [promise.lease.ticket for promise in self.held.values()]
        assert sorted(self.table.tables()) == sorted(ticket.remote_block_ids for ticket in tickets)
        self.proof.check({ticket.lease_slot: ticket.digest for ticket in tickets})
        oldest_s = max((self.now_s - promise.lease.granted_s for promise in self.held.values()), default=None)
        assert self.table.oldest_s(self.now_s) == oldest_s


TableAgainstPromises.TestCase.settings = examples(60, steps=30)
TestTableAgainstPromises = TableAgainstPromises.TestCase


@pytest.fixture
def proof() -> Proof:
    return Proof(4)


@pytest.fixture
def table(proof: Proof) -> LeaseTable:
    return LeaseTable(proof, seconds=SECONDS)


def test_a_reader_that_says_twice_that_it_is_done_counts_once(table: LeaseTable, proof: Proof) -> None:
    lease = granted(table, proof, readers=2)
    said = [table.reader_done(lease.ticket.lease_id, f"decode-{reader}") for reader in (0, 0, 1, 1)]
    assert said == [None, None, lease, None]


def test_a_slot_shows_the_digest_of_its_ticket_until_the_lease_is_over(table: LeaseTable, proof: Proof) -> None:
    first = granted(table, proof).ticket
    entry = proof.num_blocks + first.lease_slot
    assert proof.generations([entry]) == (first.digest,)
    table.end(first.lease_id)
    assert proof.generations([entry]) == (0,)
    second = granted(table, proof).ticket
    assert (second.lease_slot, second.lease_id == first.lease_id) == (first.lease_slot, False)


def test_a_request_granted_again_holds_its_latest_lease_and_the_earlier_one_expires(
    table: LeaseTable, proof: Proof
) -> None:
    first, second = granted(table, proof), granted(table, proof, [2], now_s=10.0)
    assert table.end_of_request("group") is second
    assert table.end_of_request("group") is None
    assert table.expired(60.0) == [first]
    table.check()


def test_a_lease_kept_past_its_last_reader_is_found(table: LeaseTable, proof: Proof) -> None:
    granted(table, proof).done.add("decode-0")  # behind the table's back
    with pytest.raises(AssertionError, match="over is still held"):
        table.check()


TICKET = ticket_at(NOWHERE)


def test_a_ticket_has_three_heartbeats_per_lease_until_its_last_holder_is_done() -> None:
    clock = Clock()
    beats = Heartbeats(clock)
    assert (beats.due(), beats.next_s) == ([], None)

    beats.begin(TICKET)
    assert beats.due() == [TICKET]
    assert beats.due() == []
    assert beats.next_s == clock.now_s + 20.0

    clock.now_s += 20.0
    assert beats.due() == [TICKET]

    beats.end(TICKET)
    clock.now_s += 20.0
    assert beats.due() == []
    assert beats.next_s is None


def test_two_groups_with_one_ticket_keep_the_lease_until_both_are_done() -> None:
    beats = Heartbeats(Clock())
    beats.begin(TICKET)
    beats.begin(TICKET)
    beats.end(TICKET)
    assert beats.due() == [TICKET]
    assert beats.end_all() == [TICKET]
    assert beats.next_s is None


def test_the_end_of_a_ticket_that_never_began_changes_nothing() -> None:
    beats = Heartbeats(Clock())
    beats.end(TICKET)
    assert beats.end_all() == []


def test_the_heartbeat_interval_is_bounded_whatever_a_ticket_requests() -> None:
    for asked_s, every_s in ((0.0, SHORTEST_S), (-5.0, SHORTEST_S), (float("nan"), SHORTEST_S), (1e12, LONGEST_S)):
        clock = Clock()
        beats = Heartbeats(clock)
        beats.begin(ticket_at(NOWHERE, lease_s=asked_s))
        beats.due()
        assert beats.next_s == clock.now_s + every_s, asked_s
