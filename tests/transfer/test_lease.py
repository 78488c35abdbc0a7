"""The lease table against a list of promises: blocks are kept as long as was promised, and given back exactly once."""

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from motet.ids import RequestId
from motet.transfer.lease import Lease, LeaseTable
from motet.transfer.proof import Proof
from tests.property_settings import examples

SECONDS = 60.0
READERS = ["decode-0", "decode-1", "decode-2"]


@dataclass
class Promise:
    """What the model knows of a lease."""

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
        """Held, over, or never granted."""
        return data.draw(st.sampled_from([*self.held, *self.over, 1]))

    def ends(self, lease_id: int, given_back: Lease | None) -> None:
        promise = self.held.pop(lease_id)
        assert given_back is promise.lease
        self.over.append(lease_id)

    @rule(blocks=st.lists(st.integers(0, 99), unique=True, min_size=1), readers=st.integers(1, 3))
    def grant(self, blocks: list[int], readers: int) -> None:
        request_id = RequestId(f"group-{len(self.held) + len(self.over)}")
        lease = self.table.grant(request_id, blocks, readers=readers, now_s=self.now_s)
        assert (lease.request_id, lease.blocks, lease.readers) == (request_id, tuple(blocks), readers)
        assert lease.lease_id not in self.held and lease.lease_id not in self.over
        self.held[lease.lease_id] = Promise(lease, readers, self.now_s + SECONDS)

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
        self.ends(promise.lease.lease_id, self.table.end_of_request(promise.lease.request_id))
        assert self.table.end_of_request(promise.lease.request_id) is None

    @rule(seconds=st.sampled_from([0.0, 1.0, 30.0, 59.0, 60.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        due = {lease_id for lease_id, promise in self.held.items() if promise.ends_s <= self.now_s}
        next_s = self.table.next_end_s()
        assert next_s == min((promise.ends_s for promise in self.held.values()), default=None)
        expired = self.table.expired(self.now_s)
        assert {lease.lease_id for lease in expired} == due
        for lease in expired:
            self.ends(lease.lease_id, lease)

    @invariant()
    def books_and_proof_say_the_same(self) -> None:
        self.table.check()
        assert len(self.table) == len(self.held)
        assert sorted(self.table.tables()) == sorted(promise.lease.blocks for promise in self.held.values())
        self.proof.check({promise.lease.slot: lease_id for lease_id, promise in self.held.items()})
        oldest_s = max((self.now_s - promise.lease.granted_s for promise in self.held.values()), default=None)
        assert self.table.oldest_s(self.now_s) == oldest_s


TableAgainstPromises.TestCase.settings = examples(60, steps=30)
TestTableAgainstPromises = TableAgainstPromises.TestCase


def test_a_reader_that_says_so_twice_does_not_stand_for_another() -> None:
    table = LeaseTable(Proof(4), seconds=SECONDS)
    lease = table.grant(RequestId("group"), [1, 2], readers=2, now_s=0.0)
    assert table.reader_done(lease.lease_id, "decode-0") is None
    assert table.reader_done(lease.lease_id, "decode-0") is None
    assert table.reader_done(lease.lease_id, "decode-1") is lease
    assert table.reader_done(lease.lease_id, "decode-1") is None


def test_the_slot_of_a_lease_that_is_over_no_longer_shows_it() -> None:
    proof = Proof(4)
    table = LeaseTable(proof, seconds=SECONDS)
    first = table.grant(RequestId("first"), [1], readers=1, now_s=0.0)
    assert proof.generations([proof.lease_entry(first.slot)]) == (first.lease_id,)
    table.end(first.lease_id)
    assert proof.generations([proof.lease_entry(first.slot)]) == (0,)
    second = table.grant(RequestId("second"), [1], readers=1, now_s=0.0)
    assert (second.slot, second.lease_id == first.lease_id) == (first.slot, False)


def test_a_lease_is_shown_by_the_digest_of_its_ticket_once_there_is_one() -> None:
    proof = Proof(4)
    table = LeaseTable(proof, seconds=SECONDS)
    lease = table.grant(RequestId("group"), [1], readers=1, now_s=0.0)
    table.bind(lease, 2**63 - 1)
    table.check()
    assert proof.generations([proof.lease_entry(lease.slot)]) == (2**63 - 1,)
    table.end(lease.lease_id)
    table.check()
    assert proof.generations([proof.lease_entry(lease.slot)]) == (0,)


def test_a_request_granted_again_holds_its_latest_lease_and_the_earlier_one_expires() -> None:
    table = LeaseTable(Proof(4), seconds=SECONDS)
    first = table.grant(RequestId("group"), [1], readers=1, now_s=0.0)
    second = table.grant(RequestId("group"), [2], readers=1, now_s=10.0)
    assert table.end_of_request(RequestId("group")) is second
    assert table.end_of_request(RequestId("group")) is None
    assert table.expired(60.0) == [first]
    table.check()


def test_a_lease_kept_past_its_last_reader_is_found() -> None:
    table = LeaseTable(Proof(4), seconds=SECONDS)
    lease = table.grant(RequestId("group"), [1], readers=1, now_s=0.0)
    lease.done.add("decode-0")  # behind the table's back
    with pytest.raises(AssertionError, match="over is still held"):
        table.check()
