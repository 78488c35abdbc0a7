"""A position has the same padded length and the same cuts in every step."""

import pytest

from motet.engines.native.attention.attention_plan import TailReads, padded_keys, pieces


def test_few_keys_are_padded_to_multiples_of_64_and_more_to_multiples_of_512() -> None:
    lengths = (1, 64, 65, 128, 129, 192, 193, 512, 513, 1024, 1025)
    assert [padded_keys(n) for n in lengths] == [64, 64, 128, 128, 192, 192, 512, 512, 1024, 1024, 1536]


def test_a_stretch_is_cut_where_the_padded_length_changes() -> None:
    assert list(pieces(50, 600)) == [(50, 64, 64), (64, 128, 128), (128, 192, 192), (192, 512, 512), (512, 600, 1024)]
    assert list(pieces(64, 65)) == [(64, 65, 128)]
    assert list(pieces(5, 5)) == []


@pytest.mark.parametrize("begin", [0, 1, 63, 64, 191, 192, 511])
def test_a_position_has_the_same_padded_length_at_any_start_of_a_stretch(begin: int) -> None:
    for end in (begin + 1, begin + 70, begin + 700):
        parts = list(pieces(begin, end))
        assert [position for first, last, _ in parts for position in range(first, last)] == list(range(begin, end))
        for first, last, keys in parts:
            assert {padded_keys(position + 1) for position in range(first, last)} == {keys}


def test_pieces_of_one_shape_are_read_together() -> None:
    reads = TailReads()
    reads.add(0, 10, count=1, num_keys=64, table=[1])
    reads.add(1, 70, count=1, num_keys=128, table=[2, 3])
    reads.add(2, 5, count=1, num_keys=64, table=[4])
    reads.add(3, 8, count=3, num_keys=64, table=[5])
    assert [(r.rows, r.rows_per_piece, r.first_offsets, r.num_keys, r.tables) for r in reads.finished()] == [
        ((0, 2), 1, (10, 5), 64, ([1], [4])),
        ((3, 4, 5), 3, (8,), 64, ([5],)),
        ((1,), 1, (70,), 128, ([2, 3],)),
    ]
