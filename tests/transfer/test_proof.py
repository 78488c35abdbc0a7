"""The proof against plain lists: entries, slots, and generations that a reused block no longer matches."""

import ctypes

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from motet.transfer.proof import LEASE_SLOTS, Proof
from tests.property_settings import examples


def in_memory(proof: Proof) -> list[int]:
    """Returns the entries as a reader finds them at the proof's address."""
    return list((ctypes.c_int64 * proof.num_entries).from_address(proof.address))


class ProofAgainstLists(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 5))
    def make(self, num_blocks: int) -> None:
        self.proof = Proof(num_blocks)
        self.address = self.proof.address
        self.generations = [*self.proof.generations(range(num_blocks))]
        self.published: dict[int, int] = {}

    @rule(data=st.data())
    def reuse_blocks(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.integers(0, len(self.generations) - 1), unique=True))
        before = self.proof.generations(blocks)
        self.proof.increment_generations(blocks)
        for block in blocks:
            self.generations[block] += 1
        assert all(now > then for now, then in zip(self.proof.generations(blocks), before, strict=True))

    @rule(digest=st.integers(1, 2**63 - 1))
    def publish(self, digest: int) -> None:
        slot = self.proof.allocate_slot()
        assert slot not in self.published
        self.proof.publish(slot, digest)
        self.published[slot] = digest

    @precondition(lambda self: self.published)
    @rule(data=st.data())
    def free_slot(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.published)))
        self.proof.free_slot(slot)
        del self.published[slot]

    @invariant()
    def the_memory_matches_and_has_not_moved(self) -> None:
        slots = [self.published.get(slot, 0) for slot in range(LEASE_SLOTS)]
        assert in_memory(self.proof) == self.generations + slots
        assert self.proof.address == self.address
        self.proof.check(self.published)


ProofAgainstLists.TestCase.settings = examples(30, steps=20)
TestProofAgainstLists = ProofAgainstLists.TestCase


def test_a_proof_has_a_slot_for_each_of_the_maximum_number_of_leases() -> None:
    proof = Proof(1)
    slots = [proof.allocate_slot() for _ in range(LEASE_SLOTS)]
    assert sorted(slots) == list(range(LEASE_SLOTS))
    assert not proof.has_free_slot
    with pytest.raises(IndexError):
        proof.allocate_slot()
    proof.free_slot(slots[0])
    assert proof.has_free_slot


def test_two_starts_do_not_have_the_same_generations() -> None:
    firsts = {Proof(1).generations([0]) for _ in range(20)}
    assert len(firsts) == 20


def test_check_finds_lost_slots_and_unexpected_digests() -> None:
    proof = Proof(1)
    slot = proof.allocate_slot()
    proof.publish(slot, 7)
    for published in ({}, {slot: 8}, {slot: 7, slot + 1: 9}):
        with pytest.raises(AssertionError):
            proof.check(published)
    proof.check({slot: 7})
