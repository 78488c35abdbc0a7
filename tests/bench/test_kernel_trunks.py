"""The steps of `bench.kernel_trunks` share the blocks that the names of the cases claim."""

import pytest

from bench.kernel_trunks import BLOCK_SIZE, CASES, TrunkCase, inputs_of


@pytest.mark.parametrize(
    "case", [TrunkCase(3, 1, 40), TrunkCase(3, 2, 64, 20), TrunkCase(2, 1, 0, 40), *CASES.values()], ids=str
)
def test_groups_share_the_blocks_of_their_common_tokens_only(case: TrunkCase) -> None:
    plan = inputs_of(case).attention
    tables = [trunk.table for trunk in plan.trunks]
    shared = case.common // BLOCK_SIZE  # plus the last one if the prompts are equal and it is not full
    shared += not case.own and case.common % BLOCK_SIZE > 0
    used = {block for table in tables for block in table}
    assert len(used) == shared + case.groups * (len(tables[0]) - shared)
    assert all(list(table[:shared]) == list(tables[0][:shared]) for table in tables)
    tails = {block for read in plan.tails for table in read.tables for block in table}
    assert not used & tails
    assert used | tails == set(range(case.num_blocks)), "the memory has exactly these blocks"
