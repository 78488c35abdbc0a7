"""A step's attention is cut into work for a device: every row sees each of its keys once, and the result is right."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.engines.native.attention.attention_plan import Ints
from motet.engines.native.cuda.work import Geometry, Sections, bucket_lengths, buckets, plan_work
from motet.engines.native.step.inputs import build_inputs
from motet.engines.native.step.step_plan import StepPlan, TailChunk, TrunkChunk
from tests.engines.native.attention.attention_scene import BLOCK_SIZE, AttentionScene, Shape, reading
from tests.engines.native.cuda.plain_operators import PlainOperators
from tests.engines.native.cuda.scenes import LENGTHS, RULES, decoding, steps_with
from tests.property_settings import examples

H100 = Geometry(num_heads=32, num_kv_heads=8, multiprocessors=132, block_size=BLOCK_SIZE)
SHAPES = [Shape(4, 4, 16), Shape(6, 2, 16), Shape(9, 1, 16)]


def work_of(tails: list[TailChunk], trunks: list[TrunkChunk], geometry: Geometry = H100) -> Sections[Ints]:
    return plan_work(build_inputs(StepPlan(tuple(tails), tuple(trunks)), BLOCK_SIZE), geometry).ints


@pytest.mark.parametrize(
    "shape", [SHAPES[1], *(pytest.param(shape, marks=pytest.mark.slow) for shape in (SHAPES[0], SHAPES[2]))], ids=str
)
@examples(8)
@given(data=st.data())
def test_work_cut_for_a_device_equals_the_definition(shape: Shape, data: st.DataObject) -> None:
    multiprocessors = data.draw(st.sampled_from([1, 4, 60]))
    shared = data.draw(st.booleans())
    scene = AttentionScene(
        shape,
        blocks=1200,
        seed=data.draw(st.integers(0, 1000)),
        make_step=steps_with(PlainOperators(), shape, multiprocessors=multiprocessors, shared=shared),
    )
    tails, trunks = data.draw(decoding(scene)), data.draw(reading(scene, LENGTHS))
    scene.assert_step_right(tails, trunks, data.draw(st.sampled_from(RULES)))


def test_a_trunk_is_read_once_for_each_tile_and_not_for_each_choice() -> None:
    tails = list(AttentionScene(Shape(), blocks=4096).decoding(4096, [(5, 6)] * 32))
    work = work_of(tails, [])
    # 32 rows x 4 heads fill two tiles of 64; 33 items keep 132 multiprocessors busy with 8 key heads.
    assert len(work.narrow) == 32, "one item for each tail"
    assert len(work.wide) == 2 * 16
    assert {tuple(item[4:6]) for item in work.wide.tolist()} == {(b, b + 256) for b in range(0, 4096, 256)}
    alone = work_of(tails, [], replace(H100, share_trunks=False))
    assert (len(alone.wide), len(alone.narrow)) == (0, 32 + 32)


def test_what_trunks_have_in_common_is_read_once_for_their_rows() -> None:
    scene = AttentionScene(Shape(), blocks=4096)
    first = scene.decoding(1100, [(5, 6)] * 3)
    second = scene.decoding(1100, [(5, 6)] * 3, stem=first[0].sequence.group, common=100)
    few = Geometry(32, 8, 1, BLOCK_SIZE)  # a device that is busy without cutting keys
    work = plan_work(build_inputs(StepPlan((*first, *second), ()), BLOCK_SIZE), few)
    assert work.trunk_tokens_saved == 768, "three stretches of 800 keys"
    assert [item[:6] for item in work.ints.wide.tolist()] == [[0, 6, 0, 0, 0, 768]], "six rows x 4 heads are wide"
    trunks = [item for item in work.ints.narrow.tolist() if item[5] > 64]
    assert [item[:2] + item[4:7] for item in trunks] == [[0, 3, 768, 1100, 1], [3, 3, 768, 1100, 1]]
    assert work.ints.first_part.tolist() == list(range(0, 19, 3)), "what is common, the rest, and the tail"


def test_the_long_trunk_of_a_single_choice_is_cut_until_the_device_is_busy() -> None:
    work = work_of(list(AttentionScene(Shape(), blocks=4096).decoding(8192, [(5, 6)])), [])
    assert len(work.narrow) == 32 + 1, "32 items of 256 keys, and the tail"
    assert work.first_part.tolist() == [0, 33]
    assert [item[6] for item in work.narrow.tolist()] == list(range(33)), "the trunk's parts, then the tail's"


def test_a_prompt_in_one_piece_needs_no_merging() -> None:
    trunk = AttentionScene(Shape(), blocks=1024).reading(2000, 1000, 1600)
    work = work_of([], [trunk])
    assert len(work.final) == -(-600 // 16), "16 rows x 4 heads a tile"
    assert (len(work.narrow), len(work.wide), work.first_part.max()) == (0, 0, 0)
    assert work.final[0].tolist()[:6] == [0, 16, 0, 0, 0, 1016], "its last row sees 1016 keys"
    assert work.final[-1].tolist()[:6] == [592, 8, 0, 0, 0, 1600]


def test_the_last_tokens_of_a_long_prompt_are_cut_too() -> None:
    work = work_of([], [AttentionScene(Shape(), blocks=4096).reading(8000, 7999, 8000)])
    assert (len(work.narrow), len(work.final)) == (25, 0), "31 would be 258 keys each; a span is a multiple of 64"
    wide = work_of([], [AttentionScene(Shape(), blocks=4096).reading(8000, 7990, 8000)])
    assert (len(wide.wide), len(wide.final)) == (25, 0)


def test_a_table_that_several_items_read_is_stored_once() -> None:
    tails = list(AttentionScene(Shape(), blocks=512).decoding(800, [(5, 6)] * 20))
    assert len(work_of(tails, [], replace(H100, share_trunks=False)).tables) == 100 + 20


GEOMETRIES = st.builds(
    lambda siblings, kv_heads, processors: Geometry(siblings * kv_heads, kv_heads, processors, BLOCK_SIZE),
    st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16, 24]),
    st.sampled_from([1, 2, 8, 32]),
    st.sampled_from([1, 84, 132]),
)


@pytest.mark.slow
@examples(30)
@given(
    GEOMETRIES,
    st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 2000), st.integers(0, 700), st.integers(0, 250)),
        min_size=1,
        max_size=8,
    ),
)
def test_every_decode_step_fits_its_bucket(geometry: Geometry, groups: list[tuple[int, int, int, int]]) -> None:
    scene = AttentionScene(Shape(1, 1, 1), blocks=110_000)
    tails: list[TailChunk] = []
    for n, prompt, written, common in groups:
        stem = tails[-1].sequence.group if tails else None
        common = min(common, min(prompt, len(stem.prompt)) // BLOCK_SIZE) if stem else 0
        tails += scene.decoding(prompt, [(written, written + 1)] * n, stem=stem, common=common)
    inputs = build_inputs(StepPlan(tuple(tails), ()), BLOCK_SIZE)
    work = plan_work(inputs, geometry).ints
    room = bucket_lengths(len(tails), geometry, tables=len(work.tables))
    assert all(most >= len(needed) for most, needed in zip(room, work, strict=True))


def test_buckets_double_up_to_8_rows_and_then_grow_by_8() -> None:
    assert [buckets(most) for most in (1, 3, 9, 24)] == [[1], [1, 2, 4], [1, 2, 4, 8, 16], [1, 2, 4, 8, 16, 24]]
