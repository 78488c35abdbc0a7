"""Block tables that share blocks are read together, and a row has the same bits as when it is read alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from motet.engines.native.attention.attention_plan import AttentionPlan, PromptRead, TailReads, TrunkRead, padded_keys
from motet.engines.native.compiled_kernels import KINDS
from motet.engines.native.cpu.cpu_runner import CpuRunner, reads_of
from motet.engines.native.cpu.packed_weights import PackedModel
from motet.engines.native.kv.storage import KVLayout, KVStorage
from motet.engines.native.step.inputs import StepInputs
from motet.engines.native.step.run import ATTENTION_NAME
from tests.engines.native.drive import group, make_core, prompt_of, run
from tests.kernels import kernels_of
from tests.property_settings import examples
from tests.tiny_models import config_of

pytestmark = pytest.mark.kernels

NUM_SLOTS = 24_576
MAX_POSITIONS = 2048
DEPTH = 4
"""Branches from the root of a tree of prompts to its leaves."""
FILLS_A_READING = 48
"""Rows of the tiny models, which have two query heads for each key head."""


@dataclass(frozen=True)
class Group:
    """Choices of one prompt. `tails` holds, for each choice, the offset of its first row in the tail, and its rows."""

    trunk: tuple[int, ...]
    num_keys: int
    tails: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Prompt:
    """Rows of a prompt from a position on."""

    table: tuple[int, ...]
    position: int
    rows: int


class Stage:
    """A tiny model with the compiled kernels, and random keys and values in every block."""

    def __init__(self, kind: str, family: str, dtype_name: str, block_size: int) -> None:
        kernels, dtype = kernels_of(kind), getattr(torch, dtype_name)
        torch.manual_seed(7)
        config = config_with_windows(family)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
        layout = KVLayout(config.num_hidden_layers, block_size, 2, 32, dtype)
        self.storage = KVStorage(layout, NUM_SLOTS // block_size, device=torch.device("cpu"))
        for pool in (self.storage.keys, self.storage.values):
            pool.copy_(torch.randn(pool.shape))
        packed = PackedModel(model, self.storage, max_positions=MAX_POSITIONS, kernels=kernels)
        self.runners = {n: CpuRunner(packed, self.storage, num_threads=n, kernels=kernels) for n in (1, 2)}

    def run(
        self,
        groups: Sequence[Group],
        tables: Sequence[Sequence[list[int]]],
        *,
        num_threads: int,
        prompts: Sequence[Prompt] = (),
    ) -> torch.Tensor:
        """Returns the logits of all rows of the groups and prompts. `tables`: of each group's tails."""
        size = self.storage.block_size
        tails, trunks, slots = TailReads(), [], list[int]()
        positions: list[int] = []
        for one, own in zip(groups, tables, strict=True):
            first = len(slots)
            for (offset, rows), table in zip(one.tails, own, strict=True):
                tails.add(len(slots), offset, count=rows, num_keys=padded_keys(offset + rows), table=table)
                for at in range(offset, offset + rows):
                    slots.append(table[at // size] * size + at % size)
                    positions.append(one.num_keys + at)
            trunks.append(TrunkRead(first, len(slots), tuple(positions[first:]), one.num_keys, one.trunk))
        num_tail_rows, reads = len(slots), []
        for each in prompts:
            end = each.position + each.rows
            reads.append(PromptRead(len(slots), len(slots) + each.rows, each.position, end, each.table))
            slots += [each.table[at // size] * size + at % size for at in range(each.position, end)]
            positions += range(each.position, end)
        count = len(slots)
        plan = AttentionPlan(num_tail_rows, tuple(reads), tuple(trunks), tails.finished())
        tokens = [3 + position % 300 for position in positions]
        inputs = StepInputs(tokens, positions, slots, [*range(count)], count, [], [], plan)
        return self.runners[num_threads].run(inputs).clone()


def config_with_windows(family: str) -> PreTrainedConfig:
    """Returns a tiny config of two layers; a window, where the family has one, ends within some stretch."""
    fields = config_of(family).to_dict() | {"num_hidden_layers": 2}
    if fields.get("layer_types"):
        fields |= {"sliding_window": 300, "layer_types": fields["layer_types"][:2]}
    return type(config_of(family))(**fields)


stage = lru_cache(maxsize=4)(Stage)
"""Keeps the stages of one test, one for each block size."""


@st.composite
def trees(draw: st.DrawFn, block_size: int) -> list[Group]:
    """Draws groups whose prompts are leaves of a tree. Each level adds the blocks of its branch."""
    lengths = [draw(st.integers(1, 320 // block_size)) for _ in range(DEPTH)]  # in blocks
    free = count()
    branches: dict[tuple[int, ...], tuple[int, ...]] = {}

    def blocks_of(path: tuple[int, ...]) -> tuple[int, ...]:
        if path not in branches:
            branches[path] = tuple(next(free) for _ in range(lengths[len(path) - 1]))
        return branches[path]

    groups = []
    paths = st.lists(st.integers(0, 1), min_size=1, max_size=DEPTH).map(tuple)
    tail = st.tuples(st.integers(0, 70), st.integers(1, 4))
    for path in draw(st.lists(paths, min_size=2, max_size=9)):
        trunk = tuple(block for depth in range(len(path)) for block in blocks_of(path[: depth + 1]))
        missing = draw(st.integers(0, block_size - 1) | st.just(0))
        many = block_size <= 16 and draw(st.integers(0, 9)) == 0
        tails = [(5, 1)] * (FILLS_A_READING + 5) if many else draw(st.lists(tail, min_size=1, max_size=3))
        groups.append(Group(trunk, len(trunk) * block_size - missing, tuple(tails)))
    return groups


def tables_for(groups: Sequence[Group], *, block_size: int) -> list[list[list[int]]]:
    """Returns the block tables of all tails, which use blocks after the blocks of the trunks."""
    free = iter(range(max(block for one in groups for block in one.trunk) + 1, NUM_SLOTS // block_size))
    return [
        [[next(free) for _ in range(-(-(offset + rows) // block_size))] for offset, rows in one.tails] for one in groups
    ]


FAST = (("avx512", "gemma2", "bfloat16"), ("avx2", "gemma2", "float32"))
KERNELS = [
    pytest.param(*which, marks=[] if which in FAST else pytest.mark.slow)
    for which in product(KINDS, ("gemma2", "llama"), ("bfloat16", "float32"))
]
"""Gemma 2 has a window and capped scores, Llama neither."""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "family", "dtype"), KERNELS)
@examples(8)
@given(data=st.data())
def test_a_row_has_the_same_bits_alone_and_with_any_other_rows(
    kind: str, family: str, dtype: str, data: st.DataObject
) -> None:
    block_size = data.draw(st.sampled_from([8, 16, 32, 128]))
    groups = data.draw(trees(block_size))
    here = stage(kind, family, dtype, block_size)
    tables = tables_for(groups, block_size=block_size)
    alone = [here.run([one], [own], num_threads=1) for one, own in zip(groups, tables, strict=True)]
    memory = [pool.clone() for pool in (here.storage.keys, here.storage.values)]
    together = here.run(groups, tables, num_threads=data.draw(st.sampled_from([1, 2])))
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(here.storage.keys, memory[0]) and torch.equal(here.storage.values, memory[1])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "family", "dtype"), KERNELS)
@examples(8)
@given(data=st.data())
def test_a_prompt_row_has_the_same_bits_alone_and_next_to_rows_with_a_common_prefix(
    kind: str, family: str, dtype: str, data: st.DataObject
) -> None:
    block_size = data.draw(st.sampled_from([8, 32]))
    drawn = data.draw(trees(block_size))
    here = stage(kind, family, dtype, block_size)
    tables, num_groups = tables_for(drawn, block_size=block_size), len(drawn) // 3
    prompts = [
        Prompt((*one.trunk, *own[0]), len(one.trunk) * block_size + one.tails[0][0], one.tails[0][1])
        for one, own in zip(drawn[num_groups:], tables[num_groups:], strict=True)
    ]
    groups, tails = drawn[:num_groups], tables[:num_groups]
    alone = [here.run([one], [own], num_threads=1) for one, own in zip(groups, tails, strict=True)]
    alone += [here.run([], [], num_threads=1, prompts=[one]) for one in prompts]
    together = here.run(groups, tails, num_threads=data.draw(st.sampled_from([1, 2])), prompts=prompts)
    assert torch.equal(together, torch.cat(alone))


def joined(*trunks: tuple[Sequence[int], int], prompts: Sequence[Prompt] = ()) -> int:
    """Returns how many keys groups of two choices with these trunks did not read, with blocks of 16 and one thread."""
    here = stage(KINDS[-1], "llama", "float32", 16)
    groups = [Group(tuple(blocks), num_keys, ((3, 1),) * 2) for blocks, num_keys in trunks]
    here.run(groups, tables_for(groups, block_size=16), num_threads=1, prompts=prompts)
    return here.runners[1].trunk_tokens_saved


@pytest.mark.slow
def test_keys_in_common_are_read_once_in_every_stretch() -> None:
    prompt = range(40)  # 640 keys: two stretches of 256 and one of 128
    assert joined((prompt, 640), (prompt, 640)) == 640
    assert joined((prompt, 640), (range(35), 560)) == 512 + 48
    assert joined((prompt, 640), (prompt, 633)) == 633, "the last block is as full as the shorter one's"
    assert joined((prompt, 640), (prompt, 640), (prompt, 640)) == 2 * 640


def test_a_branch_reads_only_what_it_has_alone() -> None:
    trunk, left, right = [*range(20)], [*range(50, 60)], [*range(60, 70)]  # 320 keys, then 160 each
    assert joined(([*trunk, *left], 480), ([*trunk, *right], 480)) == 320
    assert joined(([*trunk, *left], 480), ([*trunk, *right], 480), ([*trunk, *left], 480)) == 320 + 480


def test_common_blocks_count_at_every_position_of_the_prompt() -> None:
    one, other = [*range(16)], [*range(16, 32)]
    assert joined(([*one, *range(40, 56)], 512), ([*other, *range(40, 56)], 512)) == 256, "the second stretch"


def test_few_rows_of_prompts_with_a_common_prefix_read_complete_stretches_together() -> None:
    tables = [range(20), [*range(17), 30, 31, 32], range(40, 60), range(20)]
    reads = [PromptRead(i, i + 4, 300, 304, table) for i, table in enumerate(tables[:3])]
    wide = PromptRead(3, 3 + FILLS_A_READING, 270, 320, tables[3])

    def shared(plan: AttentionPlan) -> list[int]:
        spans, pieces, _ = reads_of(plan, 16, max_rows=FILLS_A_READING)
        assert [*spans[4::6] + pieces[2::4]] == [read.first_position for read in plan.prompts]
        return [*spans[4::6]]

    assert shared(AttentionPlan(0, (*reads, wide), (), ())) == [256, 256, 0, 0]
    assert shared(AttentionPlan(0, (reads[0], wide), (), ())) == [0, 0]


def test_keys_that_only_prompts_read_are_not_counted() -> None:
    prompts = [Prompt((*range(20), 60 + i), 320, 5) for i in range(3)]
    assert joined((range(30, 50), 320), prompts=prompts) == 0
    assert joined((range(20), 320), (range(20), 320), prompts=prompts) >= 320


def test_prompts_with_nothing_in_common_are_read_one_by_one() -> None:
    assert joined((range(20), 320), (range(20, 40), 320)) == 0
    assert joined((range(20), 320)) == 0


@pytest.mark.slow
def test_the_engine_counts_a_shared_prefix_once_for_prompts_read_together(
    tiny: Callable[[str], Path],
) -> None:
    core = make_core(tiny("llama"), num_threads=1)
    prefix = prompt_of(80)  # ten full blocks
    prompts = [(*prefix, *prompt_of(3, 1 + i)) for i in range(8)]
    run(core, [group("first", (*prefix, 9), max_tokens=1)])
    assert core.counters.trunk_tokens_read == 0, "the first token comes from the prompt's own last row"
    run(core, [group(f"{i}", prompt, max_tokens=3, seed=i) for i, prompt in enumerate(prompts)])
    read, unshared = core.counters.trunk_tokens_read, core.counters.trunk_tokens_unshared
    assert unshared == 2 * 8 * 83
    assert unshared - read == 2 * 6 * 80, "two readings of four rows each"
