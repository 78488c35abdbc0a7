"""The proof against plain lists, and its promise: a block that was given away no longer matches."""

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
        self.shown: dict[int, int] = {}

    @rule(data=st.data())
    def hand_blocks_out_again(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.integers(0, len(self.generations) - 1), unique=True))
        before = self.proof.generations(blocks)
        self.proof.raise_generations(blocks)
        for block in blocks:
            self.generations[block] += 1
        assert all(now > then for now, then in zip(self.proof.generations(blocks), before, strict=True))

    @rule(digest=st.integers(1, 2**63 - 1))
    def show(self, digest: int) -> None:
        slot = self.proof.take_slot()
        assert slot not in self.shown
        self.proof.show(slot, digest)
        self.shown[slot] = digest

    @precondition(lambda self: self.shown)
    @rule(data=st.data())
    def hide(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.shown)))
        self.proof.hide(slot)
        del self.shown[slot]

    @invariant()
    def memory_says_the_same_and_has_not_moved(self) -> None:
        slots = [self.shown.get(slot, 0) for slot in range(LEASE_SLOTS)]
        assert in_memory(self.proof) == self.generations + slots
        assert self.proof.address == self.address
        self.proof.check(self.shown)


ProofAgainstLists.TestCase.settings = examples(30, steps=20)
TestProofAgainstLists = ProofAgainstLists.TestCase


def test_a_proof_has_room_for_as_many_leases_as_slots() -> None:
    proof = Proof(1)
    slots = [proof.take_slot() for _ in range(LEASE_SLOTS)]
    assert sorted(slots) == list(range(LEASE_SLOTS))
    assert not proof.has_room
    with pytest.raises(IndexError):
        proof.take_slot()
    proof.hide(slots[0])
    assert proof.has_room


def test_two_starts_do_not_have_the_same_generations() -> None:
    firsts = {Proof(1).generations([0]) for _ in range(20)}
    assert len(firsts) == 20


def test_check_finds_slots_that_are_lost_or_show_what_nobody_expects() -> None:
    proof = Proof(1)
    slot = proof.take_slot()
    proof.show(slot, 7)
    for shown in ({}, {slot: 8}, {slot: 7, slot + 1: 9}):
        with pytest.raises(AssertionError):
            proof.check(shown)
    proof.check({slot: 7})
