"""Leases on both sides: the owner keeps the blocks for the time of the lease and releases them once; readers send
heartbeats."""

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from motet.transfer.lease import MAX_INTERVAL_S, MIN_INTERVAL_S, Heartbeats, Lease, LeaseTable
from motet.transfer.proof import Proof
from tests.clock import Clock
from tests.property_settings import examples
from tests.transfer.worker import NOWHERE, granted, ticket_at

LEASE_S = 60.0
READERS = ["decode-0", "decode-1", "decode-2"]


@dataclass
class LeaseRecord:
    """The model's record of a lease."""

    lease: Lease
    num_readers: int
    expires_s: float
    done_readers: set[str] = field(default_factory=set)


class TableAgainstRecords(RuleBasedStateMachine):
    @initialize()
    def make(self) -> None:
        self.proof = Proof(100)
        self.table = LeaseTable(self.proof, seconds=LEASE_S)
        self.held: dict[int, LeaseRecord] = {}
        self.ended: list[int] = []
        self.now_s = 0.0

    def some_lease(self, data: st.DataObject) -> int:
        """Returns the id of a lease that is held, has ended, or was never granted."""
        return data.draw(st.sampled_from([*self.held, *self.ended, 1]))

    def check_ended(self, lease_id: int, returned: Lease | None) -> None:
        record = self.held.pop(lease_id)
        assert returned is record.lease
        self.ended.append(lease_id)

    @rule(blocks=st.lists(st.integers(0, 99), unique=True, min_size=1), readers=st.integers(1, 3))
    def grant(self, blocks: list[int], readers: int) -> None:
        name = f"group-{len(self.held) + len(self.ended)}"
        lease = granted(self.table, self.proof, blocks, now_s=self.now_s, readers=readers, remote_request_id=name)
        lease_id = lease.ticket.lease_id
        assert lease_id not in self.held and lease_id not in self.ended
        self.held[lease_id] = LeaseRecord(lease, readers, self.now_s + LEASE_S)

    @rule(data=st.data(), reader=st.sampled_from(READERS))
    def a_reader_is_done(self, data: st.DataObject, reader: str) -> None:
        lease_id = self.some_lease(data)
        returned = self.table.reader_done(lease_id, reader)
        record = self.held.get(lease_id)
        if record is None:
            assert returned is None
            return
        record.done_readers.add(reader)
        if len(record.done_readers) < record.num_readers:
            assert returned is None
        else:
            self.check_ended(lease_id, returned)

    @rule(data=st.data())
    def a_heartbeat_comes(self, data: st.DataObject) -> None:
        lease_id = self.some_lease(data)
        self.table.extend(lease_id, self.now_s)
        if lease_id in self.held:
            self.held[lease_id].expires_s = self.now_s + LEASE_S

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = self.some_lease(data)
        returned = self.table.release(lease_id)
        if lease_id in self.held:
            self.check_ended(lease_id, returned)
        else:
            assert returned is None

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release_request(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(list(self.held.values())))
        ticket = record.lease.ticket
        self.check_ended(ticket.lease_id, self.table.release_request(ticket.remote_request_id))
        assert self.table.release_request(ticket.remote_request_id) is None

    @rule(seconds=st.sampled_from([0.0, 1.0, 30.0, 59.0, 60.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        due = {lease_id for lease_id, record in self.held.items() if record.expires_s <= self.now_s}
        next_s = self.table.next_expiry_s()
        assert next_s == min((record.expires_s for record in self.held.values()), default=None)
        expired = self.table.expire(self.now_s)
        assert {lease.ticket.lease_id for lease in expired} == due
        for lease in expired:
            self.check_ended(lease.ticket.lease_id, lease)

    @invariant()
    def table_proof_and_records_agree(self) -> None:
        self.table.check()
        assert len(self.table) == len(self.held)
        tickets = [record.lease.ticket for record in self.held.values()]
        assert sorted(self.table.tables()) == sorted(ticket.remote_block_ids for ticket in tickets)
        self.proof.check({ticket.lease_slot: ticket.digest for ticket in tickets})
        oldest_age_s = max((self.now_s - record.lease.granted_s for record in self.held.values()), default=None)
        assert self.table.oldest_age_s(self.now_s) == oldest_age_s


TableAgainstRecords.TestCase.settings = examples(60, steps=30)
TestTableAgainstRecords = TableAgainstRecords.TestCase


@pytest.fixture
def proof() -> Proof:
    return Proof(4)


@pytest.fixture
def table(proof: Proof) -> LeaseTable:
    return LeaseTable(proof, seconds=LEASE_S)


def test_a_reader_that_reports_twice_that_it_is_done_counts_once(table: LeaseTable, proof: Proof) -> None:
    lease = granted(table, proof, readers=2)
    ended = [table.reader_done(lease.ticket.lease_id, f"decode-{reader}") for reader in (0, 0, 1, 1)]
    assert ended == [None, None, lease, None]


def test_a_slot_has_the_digest_of_its_ticket_until_the_lease_ends(table: LeaseTable, proof: Proof) -> None:
    first = granted(table, proof).ticket
    entry = proof.num_blocks + first.lease_slot
    assert proof.generations([entry]) == (first.digest,)
    table.release(first.lease_id)
    assert proof.generations([entry]) == (0,)
    second = granted(table, proof).ticket
    assert (second.lease_slot, second.lease_id == first.lease_id) == (first.lease_slot, False)


def test_a_request_granted_again_holds_its_latest_lease_and_the_earlier_one_expires(
    table: LeaseTable, proof: Proof
) -> None:
    first, second = granted(table, proof), granted(table, proof, [2], now_s=10.0)
    assert table.release_request("group") is second
    assert table.release_request("group") is None
    assert table.expire(60.0) == [first]
    table.check()


def test_check_finds_a_lease_that_is_held_after_its_last_reader_is_done(table: LeaseTable, proof: Proof) -> None:
    granted(table, proof).done_readers.add("decode-0")  # without the table's knowledge
    with pytest.raises(AssertionError, match="held although all its readers are done"):
        table.check()


TICKET = ticket_at(NOWHERE)


def test_a_ticket_has_three_heartbeats_per_lease_until_its_last_holder_is_done() -> None:
    clock = Clock()
    heartbeats = Heartbeats(clock)
    assert (heartbeats.due(), heartbeats.next_s) == ([], None)

    heartbeats.hold(TICKET)
    assert heartbeats.due() == [TICKET]
    assert heartbeats.due() == []
    assert heartbeats.next_s == clock.now_s + 20.0

    clock.now_s += 20.0
    assert heartbeats.due() == [TICKET]

    heartbeats.release(TICKET)
    clock.now_s += 20.0
    assert heartbeats.due() == []
    assert heartbeats.next_s is None


def test_two_groups_with_one_ticket_keep_the_lease_until_both_are_done() -> None:
    heartbeats = Heartbeats(Clock())
    heartbeats.hold(TICKET)
    heartbeats.hold(TICKET)
    heartbeats.release(TICKET)
    assert heartbeats.due() == [TICKET]
    assert heartbeats.release_all() == [TICKET]
    assert heartbeats.next_s is None


def test_releasing_a_ticket_that_is_not_held_changes_nothing() -> None:
    heartbeats = Heartbeats(Clock())
    heartbeats.release(TICKET)
    assert heartbeats.release_all() == []


@pytest.mark.parametrize(
    ("lease_s", "every_s"),
    [(0.0, MIN_INTERVAL_S), (-5.0, MIN_INTERVAL_S), (float("nan"), MIN_INTERVAL_S), (1e12, MAX_INTERVAL_S)],
)
def test_the_heartbeat_interval_is_bounded_whatever_a_ticket_requests(lease_s: float, every_s: float) -> None:
    clock = Clock()
    heartbeats = Heartbeats(clock)
    heartbeats.hold(ticket_at(NOWHERE, lease_s=lease_s))
    heartbeats.due()
    assert heartbeats.next_s == clock.now_s + every_s
