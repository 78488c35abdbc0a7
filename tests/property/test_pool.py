"""The block pool against plain lists and sets."""

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from motet.engines.native.kv.pool import BlockPool, OutOfBlocksError
from motet.kv_events.changes import Removed, Stored
from tests.property_settings import examples

pytestmark = pytest.mark.slow

NAMES = [bytes([i]) for i in range(10)]


class PoolAgainstSets(RuleBasedStateMachine):
    """A pool and its model: `tables` has the blocks of each caller, and a block is held once for each table."""

    @initialize(num_blocks=st.integers(1, 12))
    def make(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: list[list[int]] = []
        self.free = set(range(num_blocks))
        self.idle: list[int] = []  # least recently used first
        self.block_of: dict[bytes, int] = {}
        self.stored: dict[bytes, tuple[int, ...]] = {}  # tokens of each block, as followers of the changes know it

    @rule(count=st.integers(0, 13), follow=st.booleans())
    def take(self, count: int, follow: bool) -> None:
        after = self.tables[-1][-1] if follow and self.tables else None
        if count > len(self.free) + len(self.idle):
            with pytest.raises(OutOfBlocksError):
                self.pool.take(count, after=after)
            return
        while len(self.free) < count:
            self._forget_name(evicted := self.idle.pop(0))
            self.free.add(evicted)
        taken = self.pool.take(count, after=after)
        assert len(taken) == count == len(set(taken))
        assert set(taken) <= self.free, "only free blocks, and the least recently used idle blocks"
        self.free -= set(taken)
        if taken:
            self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.share(table)
        self.tables.append(list(table))

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=4, unique=True))
    def find_and_share(self, names: list[bytes]) -> None:
        found = self.pool.find(names)
        known = [self.block_of.get(name) for name in names]
        longest = known.index(None) if None in known else len(known)
        assert found == known[:longest]
        self.pool.share(found)
        self.idle = [block for block in self.idle if block not in found]
        if found:
            self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        held = {block for other in self.tables for block in other}
        for block in reversed(table):
            if block not in held:
                if block in self.block_of.values():
                    self.idle.append(block)
                else:
                    self.free.add(block)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), names=st.lists(st.sampled_from(NAMES), min_size=4, max_size=4, unique=True))
    def publish(self, data: st.DataObject, names: list[bytes]) -> None:
        blocks = data.draw(st.sampled_from(self.tables))[:4]
        names = names[: len(blocks)]
        self.pool.publish(blocks, Stored(tuple(names), b"parent", tuple(name[0] for name in names)))
        for block, name in zip(blocks, names, strict=True):
            if name not in self.block_of and block not in self.block_of.values():
                self.block_of[name] = block

    def _forget_name(self, block: int) -> None:
        self.block_of = {name: other for name, other in self.block_of.items() if other != block}

    @invariant()
    def pool_and_model_agree(self) -> None:
        self.pool.check()
        held = Counter(block for table in self.tables for block in table)
        assert self.pool.holders() == held
        assert self.pool.num_held == len(held)
        assert self.pool.num_idle == len(self.idle)
        assert self.pool.num_free == len(self.free) + len(self.idle)

    @rule()
    def take_changes(self) -> None:
        for change in self.pool.take_changes():
            match change:
                case Stored():
                    parts = [change.part(i, i + 1) for i in range(len(change.names))]
                    assert self.stored.keys().isdisjoint(change.names)
                    self.stored |= {part.names[0]: part.token_ids for part in parts}
                case Removed():
                    for name in change.names:
                        del self.stored[name]
        assert self.stored == {name: (name[0],) for name in self.block_of}


TestPool = PoolAgainstSets.TestCase
TestPool.settings = examples(80, steps=40)
