"""One step's attention equals the definition, and each row has the same bits as alone."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motet.engines.native.step.step_plan import TailChunk, TrunkChunk
from tests.engines.native.attention.attention_scene import BLOCK_SIZE, AttentionScene, Chunk, Rule, Shape, reading
from tests.pairwise import each_once, pairwise
from tests.property_settings import examples

PLAIN = Rule()
SHAPES = [
    Shape(4, 4, 16),
    Shape(6, 2, 16),
    Shape(4, 1, 64),
    Shape(4, 4, 64, torch.bfloat16),
    Shape(3, 1, 64, torch.bfloat16),
    Shape(4, 1, 16, torch.bfloat16),
    Shape(4, 2, 32, torch.float16),
]
SHAPES_MOSTLY_SLOW = [
    shape if i in (0, 5) else pytest.param(shape, marks=pytest.mark.slow) for i, shape in enumerate(SHAPES)
]
"""Only two shapes are tried in the fast run."""
RULES = [Rule(), Rule(window=5), Rule(window=40), Rule(softcap=2.0), Rule(window=24, softcap=2.0)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


lengths = st.integers(1, 40) | st.sampled_from([63, 64, 65, 130, 190, 200])
pieces = st.tuples(st.integers(0, 30) | st.sampled_from([60, 63, 64, 127, 190, 195]), st.integers(1, 6))


@st.composite
def steps(draw: st.DrawFn, shape: Shape) -> tuple[AttentionScene, list[TailChunk], list[TrunkChunk]]:
    """Draws up to three groups that decode or replay, and two that read their prompts."""
    scene = AttentionScene(shape, seed=draw(st.integers(0, 1000)))
    tails: list[TailChunk] = []
    for _ in range(draw(st.integers(0, 3))):
        parts = draw(st.lists(pieces, min_size=1, max_size=4))
        tails += scene.decoding(
            draw(lengths), [(begin, begin + rows) for begin, rows in parts], fragmented=draw(st.booleans())
        )
    return scene, tails, draw(reading(scene, lengths, at_least=0 if tails else 1))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES_MOSTLY_SLOW, ids=str)
@examples(8)
@given(data=st.data())
def test_mixed_batches_equal_the_definition_and_each_row_has_its_bits_alone(shape: Shape, data: st.DataObject) -> None:
    scene, tails, trunks = data.draw(steps(shape))
    rule = data.draw(st.sampled_from(RULES))
    outputs = scene.assert_step_right(tails, trunks, rule)
    alone = [scene.attend([tail], [], rule)[0] for tail in tails]
    alone += [scene.attend([], [trunk], rule)[0] for trunk in trunks]
    assert all(torch.equal(one, other) for one, other in zip(alone, outputs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "rule"), each_once(SHAPES[1:4], RULES))
def test_many_siblings_over_a_long_trunk_equal_the_definition(shape: Shape, rule: Rule) -> None:
    scene = AttentionScene(shape, blocks=1024)
    tails = scene.decoding(523, [(i, i + 1) for i in range(33)])
    outputs = scene.attend(tails, [], rule)
    for i in (0, 7, 32):
        scene.assert_right(tails[i], outputs[i], rule)
        assert torch.equal(scene.attend(tails[i : i + 1], [], rule)[0], outputs[i])


@pytest.mark.parametrize("window", [1, 2, 8, 20])
def test_the_trunk_has_no_weight_for_rows_whose_window_has_left_it(window: int) -> None:
    """Their siblings still see some of it."""
    scene = AttentionScene(Shape())
    tails = scene.decoding(30, [(0, 1), (6, 7), (7, 8), (18, 19), (19, 22), (45, 46)])
    scene.assert_step_right(tails, [scene.reading(100, 70, 90)], Rule(window=window))


def test_layers_of_one_step_may_have_different_windows() -> None:
    scene = AttentionScene(Shape())
    tails, trunk = scene.decoding(30, [(0, 1), (25, 27)]), scene.reading(50, 10, 50)
    rules = [Rule(window=8), PLAIN, Rule(window=20), Rule(window=8, softcap=2.0)]
    chunks: list[Chunk] = [*tails, trunk]
    for rule, outputs in zip(rules, scene.attend_layers(tails, [trunk], rules), strict=True):
        for chunk, output in zip(chunks, outputs, strict=True):
            scene.assert_right(chunk, output, rule)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "window"), each_once(SHAPES, [20, None]))
def test_a_prompt_in_chunks_has_the_bits_of_the_whole_prompt(shape: Shape, window: int | None) -> None:
    scene, rule = AttentionScene(shape), Rule(window=window)
    chunk = scene.reading(300, 0, 300)
    (complete,) = scene.attend([], [chunk], rule)
    cuts = [0, 1, 4, 37, 64, 100, 191, 194, 256, 299, 300]
    parts = [
        scene.attend([], [TrunkChunk(chunk.group, begin, end)], rule)[0] for begin, end in itertools.pairwise(cuts)
    ]
    assert torch.equal(torch.cat(parts), complete)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "window"), each_once(SHAPES, [20, None]))
def test_a_replay_has_the_bits_of_single_tokens(shape: Shape, window: int | None) -> None:
    scene, rule = AttentionScene(shape), Rule(window=window)
    (chunk,) = scene.decoding(45, [(50, 140)])
    (replayed,) = scene.attend([chunk], [], rule)
    for offset in (50, 63, 64, 65, 127, 128, 139):
        (one,) = scene.attend([TailChunk(chunk.sequence, offset, offset + 1)], [], rule)
        assert torch.equal(one[0], replayed[offset - 50])


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_where_blocks_lie_does_not_matter(rule: Rule) -> None:
    scene = AttentionScene(Shape())
    tails, trunk = scene.decoding(70, [(3, 4), (66, 70)]), scene.reading(150, 20, 120)
    before = scene.attend(tails, [trunk], rule)
    trunk.group.trunk.blocks.reverse()
    tails[0].sequence.group.trunk.blocks.reverse()
    tails[1].sequence.blocks.reverse()
    for one, other in zip(before, scene.attend(tails, [trunk], rule), strict=True):
        assert torch.equal(one, other)


def test_keys_may_be_read_beyond_the_last_block_of_the_pool() -> None:
    scene = AttentionScene(Shape(), blocks=160)
    trunk = scene.reading(513, 500, 513)
    trunk.group.trunk.blocks = list(range(160 - 65, 160))  # 1024 keys are read, 504 of them beyond the pool
    scene.assert_step_right([], [trunk])


@pytest.mark.parametrize(
    ("shape", "rule", "what"),
    pairwise([SHAPES[1], SHAPES[4], SHAPES[6]], [PLAIN, Rule(window=12), Rule(softcap=2.0)], ["nan", "inf", "huge"]),
)
def test_a_broken_group_does_not_reach_its_neighbours(shape: Shape, rule: Rule, what: str) -> None:
    """The read of a prompt goes beyond its table, here into the blocks of a group whose KV is broken."""
    scene = AttentionScene(shape)
    healthy, broken = scene.reading(20, 0, 20), scene.reading(40, 0, 40)
    assert broken.group.trunk.blocks[0] == healthy.group.trunk.blocks[-1] + 1
    tails = scene.decoding(33, [(3, 4), (5, 6)])
    before = scene.attend(tails, [healthy, broken], rule)
    number = torch.finfo(shape.dtype).max if what == "huge" else float(what)
    for vectors in (scene.vectors[broken.group], scene.vectors[tails[1].sequence]):
        vectors.query.fill_(number)
        vectors.key.fill_(number)
        vectors.value.fill_(-number)
    after = scene.attend(tails, [healthy, broken], rule)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    assert not torch.equal(before[3], after[3])


def test_garbage_of_any_finite_size_beyond_a_table_does_not_matter() -> None:
    shape = Shape(dtype=torch.bfloat16)
    small, large = AttentionScene(shape, garbage=0.0), AttentionScene(shape, garbage=1e38)
    outputs = []
    for scene in (small, large):
        tails, trunk = scene.decoding(33, [(3, 4), (70, 73)]), scene.reading(20, 3, 20)
        generator = torch.Generator().manual_seed(7)
        for vectors in scene.vectors.values():
            for one in (vectors.query, vectors.key, vectors.value):
                one.copy_(torch.randn(one.shape, generator=generator))
        outputs.append(torch.cat(scene.attend(tails, [trunk], PLAIN)))
    assert torch.equal(*outputs)


def test_a_step_stores_its_own_keys_and_values_in_their_slots() -> None:
    """Later rows of the same step read them there."""
    scene = AttentionScene(Shape())
    chunk = scene.reading(BLOCK_SIZE * 2 + 3, 0, BLOCK_SIZE * 2 + 3, fragmented=True)
    scene.assert_step_right([], [chunk])
    (tail,) = scene.decoding(5, [(0, BLOCK_SIZE + 2)], fragmented=True)
    scene.assert_step_right([tail], [])
