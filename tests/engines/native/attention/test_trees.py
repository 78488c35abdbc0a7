"""Trunks with a common prefix are read together, and each row has the same bits as alone."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motet.engines.native.attention.attention_plan import STRETCH, TrunkRead, num_stretches
from motet.engines.native.attention.group_attention import StepAttention
from motet.engines.native.attention.trees import MAX_BRANCH_LEVELS, SharingGain, branches, keys_saved
from motet.engines.native.kv.storage import KVStorage
from motet.engines.native.step.inputs import StepInputs
from motet.engines.native.step.run import LayerAttention
from motet.engines.native.step.step_plan import TailChunk
from tests.engines.native.attention.attention_scene import AttentionScene, Rule, Shape, tree
from tests.property_settings import examples

SIZE = 32
"""Tokens in a block of the trunks on paper: a stretch has eight."""
ALWAYS = SharingGain(rows_at_once=10**6, min_keys_saved=0)
SHAPES = [
    Shape(4, 2, 32, torch.bfloat16),
    Shape(6, 2, 16),
    *(
        pytest.param(shape, marks=pytest.mark.slow)
        for shape in (Shape(4, 4, 64, torch.bfloat16), Shape(3, 1, 64, torch.bfloat16), Shape(4, 2, 32, torch.float16))
    ),
]
RULES = [Rule(), Rule(window=100), Rule(window=500), Rule(softcap=2.0), Rule(window=300, softcap=2.0)]


class Watch:
    """Makes the attention that the CPU runs, and keeps the last."""

    step: StepAttention

    def __call__(self, inputs: StepInputs, storage: KVStorage) -> LayerAttention:
        self.step = StepAttention(inputs.attention, torch.tensor(inputs.slots), storage=storage)
        return self.step.attend


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@examples(4)
@given(data=st.data())
def test_rows_of_a_tree_equal_the_definition_and_have_their_bits_alone(shape: Shape, data: st.DataObject) -> None:
    scene = AttentionScene(shape, blocks=2048, seed=data.draw(st.integers(0, 1000)))
    tails = data.draw(tree(scene, st.sampled_from([40, 511, 512, 800, 1100, 1540])))
    rule = data.draw(st.sampled_from(RULES))
    outputs = scene.assert_step_right(tails, [], rule)
    for tail, output in zip(tails, outputs, strict=True):
        assert torch.equal(scene.attend([tail], [], rule)[0], output)


@pytest.mark.slow
def test_the_depth_of_a_tree_and_the_number_of_its_rows_change_no_bits() -> None:
    """Four levels; on the last one many rows."""
    watch = Watch()
    scene = AttentionScene(Shape(4, 2, 32, torch.bfloat16), blocks=4096, make_step=watch)
    root = scene.decoding(1300, [(0, 1)])
    groups, stem = [root], root[0].sequence.group
    for level in range(1, 5):
        groups += [scene.decoding(1300, [(level, level + 1)] * level, stem=stem, common=32 * level) for _ in range(2)]
        stem = groups[-1][0].sequence.group
    groups.append(scene.decoding(1300, [(7, 8)] * 50, stem=stem, common=32 * 4))
    groups.sort(key=lambda tails: tails[0].sequence.group.trunk.blocks)
    tails = [tail for group in groups for tail in group]
    outputs = scene.assert_step_right(tails, [])
    for tail, output in list(zip(tails, outputs, strict=True))[::3]:
        assert torch.equal(scene.attend([tail], [], Rule())[0], output)
    assert watch.step.trunk_tokens_saved == 0, "the last row was alone"
    assert joined(tails, scene, watch) > 4 * STRETCH


def test_keys_that_are_read_together_are_counted() -> None:
    watch = Watch()
    scene = AttentionScene(Shape(), make_step=watch)
    first = scene.decoding(800, [(0, 1)] * 3)
    second, third = (scene.decoding(800, [(0, 1)], stem=first[0].sequence.group, common=70) for _ in range(2))
    assert joined([*first, *second, *third], scene, watch) == 2 * 512, "of 560 keys in common two stretches"
    assert joined([*second, *first], scene, watch) == 512
    assert joined([*first], scene, watch) == 0


def joined(tails: Sequence[TailChunk], scene: AttentionScene, watch: Watch) -> int:
    scene.attend(tails, [], Rule())
    return watch.step.trunk_tokens_saved


def trunks(*tables: Sequence[int], rows: int = 1, missing: int = 0) -> list[TrunkRead]:
    """Returns trunks of `rows` rows each, whose last blocks lack `missing` keys."""
    return [
        TrunkRead(i * rows, (i + 1) * rows, (9999,) * rows, len(table) * SIZE - missing, [*table])
        for i, table in enumerate(tables)
    ]


def grown(reads: Sequence[TrunkRead], gain: SharingGain = ALWAYS) -> list[tuple[int, int, int, int]]:
    """Returns the branches as (first row, end of rows, first key, end of keys)."""
    found = branches(reads, block_size=SIZE, gain=gain)
    return [(one.begin, one.end, one.begin_key, one.end_key) for one in found]


STEM, LEFT, RIGHT = range(20), range(100, 120), range(200, 220)  # two stretches and a half each


def test_common_keys_of_trunks_are_read_once_up_to_the_last_full_stretch() -> None:
    reads = trunks([*STEM, *LEFT], [*STEM, *RIGHT])  # 640 keys in common
    assert grown(reads) == [(0, 2, 0, 512), (0, 1, 512, 1280), (1, 2, 512, 1280)]
    assert keys_saved(branches(reads, block_size=SIZE, gain=ALWAYS)) == 512


def test_branches_fork_again() -> None:
    reads = trunks([*STEM, *LEFT], [*STEM, *LEFT[:12], *RIGHT], [*STEM, *LEFT[:12]], [*STEM, *RIGHT])
    assert grown(reads) == [
        (0, 4, 0, 512),
        (0, 3, 512, 768),
        (0, 2, 768, 1024),
        (0, 1, 1024, 1280),
        (1, 2, 1024, 1664),
        (2, 3, 768, 1024),
        (3, 4, 512, 1280),
    ], "the last stretch of the third ends where its trunk does"


def test_equal_trunks_are_read_together_to_their_end() -> None:
    reads = trunks(STEM, STEM, STEM, missing=5)
    assert grown(reads) == [(0, 3, 0, 635)]
    assert grown(trunks(range(3), range(3), missing=5)) == [(0, 2, 0, 91)]


def test_strangers_and_trunks_that_have_only_their_end_in_common_are_read_alone() -> None:
    assert grown(trunks(STEM, LEFT)) == [(0, 1, 0, 640), (1, 2, 0, 640)]
    assert grown(trunks([*STEM[:8], *RIGHT], [*LEFT[:8], *RIGHT])) == [(0, 1, 0, 896), (1, 2, 0, 896)]
    assert grown(trunks([*STEM, *LEFT])) == [(0, 1, 0, 1280)]
    assert grown([]) == []


def test_a_trunk_shorter_than_two_stretches_is_not_cut() -> None:
    assert [num_stretches(num_keys) for num_keys in (1, 256, 511, 512, 767, 768)] == [1, 1, 1, 2, 2, 3]
    assert grown(trunks([*range(10), 20], [*range(10), 30])) == [(0, 1, 0, 352), (1, 2, 0, 352)]


def test_a_branch_that_saves_too_little_is_skipped_but_not_its_sub_branches() -> None:
    reads = trunks([*STEM, *LEFT], [*STEM, *LEFT], [*STEM, *LEFT, 1], [*STEM[:8], *RIGHT])
    assert grown(reads, SharingGain(rows_at_once=10, min_keys_saved=1000)) == [
        (0, 3, 0, 1024),
        (0, 1, 1024, 1280),
        (1, 2, 1024, 1280),
        (2, 3, 1024, 1312),
        (3, 4, 0, 896),
    ]


def test_groups_that_fill_a_reading_by_themselves_are_read_alone() -> None:
    reads = trunks([*STEM, *LEFT], [*STEM, *RIGHT], rows=16)
    assert len(grown(reads, SharingGain(rows_at_once=16, min_keys_saved=1))) == 2
    assert len(grown(reads, SharingGain(rows_at_once=32, min_keys_saved=1))) == 3


def test_a_row_shares_few_branches_however_deep_the_tree_is() -> None:
    """Each trunk has eight blocks more in common with the next one than the next two have."""
    tables = [[*range(8 * depth), *range(1000 * depth, 1000 * depth + 20)] for depth in range(20, 0, -1)]
    found = grown(trunks(*tables))
    shared = [one for one in found if one[1] - one[0] > 1]
    assert max(sum(begin <= row < end for begin, end, *_ in shared) for row in range(20)) == MAX_BRANCH_LEVELS
    for row, table in enumerate(tables):
        own = sorted((begin, end) for first, last, begin, end in found if first <= row < last)
        assert own[0][0] == 0 and own[-1][1] == len(table) * SIZE
        assert all(one[1] == other[0] for one, other in pairwise(own)), "each key is read once"
