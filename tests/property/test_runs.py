"""The free runs of blocks against a plain set."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from motet.engines.native.kv.pool import FreeRuns
from tests.property_settings import examples


def maximal_runs(free: set[int]) -> list[tuple[int, int]]:
    begins = [block for block in sorted(free) if block - 1 not in free]
    ends = [block + 1 for block in sorted(free) if block + 1 not in free]
    return list(zip(begins, ends, strict=True))


class RunsAgainstSet(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(0, 24))
    def make(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.runs = FreeRuns(num_blocks)
        self.free = set(range(num_blocks))

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.free)))
        # The caller continues a table: `after` is a block it holds.
        held = sorted(set(range(self.num_blocks)) - self.free)
        after = data.draw(st.none() | st.sampled_from(held)) if held else None
        before = maximal_runs(self.free)
        taken = self.runs.take(count, after=after)
        assert len(taken) == count == len(set(taken))
        assert set(taken) <= self.free
        self.free -= set(taken)
        fitting = [end - begin for begin, end in before if end - begin >= count]
        if not count or not fitting:
            return
        assert taken == list(range(taken[0], taken[0] + count)), "one run was long enough"
        lengths = {begin: end - begin for begin, end in before}
        if after is not None and lengths.get(after + 1, 0) >= count:
            assert taken[0] == after + 1
        else:
            assert lengths[taken[0]] == min(fitting), "a longer run than necessary was used"

    @precondition(lambda self: len(self.free) < self.num_blocks)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(set(range(self.num_blocks)) - self.free)))
        self.runs.add(block)
        self.free.add(block)

    @invariant()
    def runs_and_set_agree(self) -> None:
        assert self.runs.runs() == maximal_runs(self.free)
        assert len(self.runs) == len(self.free)


TestRuns = RunsAgainstSet.TestCase
TestRuns.settings = examples(80, steps=40)
