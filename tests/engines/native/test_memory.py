"""Blocks that fit into a given memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.engines.native.memory import kv_cache_gb_for, num_blocks_for
from motet.engines.native.sequence import blocks_for
from motet.errors import KVMemoryError
from tests.property_settings import examples

MB = 2**20


def test_memory_is_counted_in_whole_blocks() -> None:
    assert num_blocks_for(1.0, MB, max_model_len=100, block_size=16) == 1024
    assert num_blocks_for(0.5, MB, max_model_len=100, block_size=16) == 512
    assert num_blocks_for(1.0, 3 * MB, max_model_len=100, block_size=16) == 341


def test_one_block_more_than_the_longest_sequence_is_enough_and_one_less_is_not() -> None:
    # 100 tokens in blocks of 16: 7 blocks, and one because prompt and tail are rounded up apart.
    assert num_blocks_for(8 / 1024, MB, max_model_len=100, block_size=16) == 8
    with pytest.raises(KVMemoryError):
        num_blocks_for(7 / 1024, MB, max_model_len=100, block_size=16)


def test_the_error_says_what_would_fit_and_that_fits() -> None:
    with pytest.raises(KVMemoryError, match=r"hold 7 blocks.*needs 8.*--max-model-len to 96 or less"):
        num_blocks_for(7 / 1024, MB, max_model_len=100, block_size=16)
    assert num_blocks_for(7 / 1024, MB, max_model_len=96, block_size=16) == 7


def test_no_memory_at_all_is_said_as_such() -> None:
    with pytest.raises(KVMemoryError, match="hold 0 blocks"):
        num_blocks_for(0.0, MB, max_model_len=100, block_size=16)


def test_a_part_of_a_gpu_is_filled_with_what_the_weights_leave() -> None:
    total = 80 * 2**30
    assert kv_cache_gb_for(0.9, total_bytes=total, free_bytes=total - 16 * 2**30) == pytest.approx(72 - 16)
    assert kv_cache_gb_for(1.0, total_bytes=total, free_bytes=total) == 80


def test_a_gpu_that_is_full_already_is_said_as_such() -> None:
    with pytest.raises(KVMemoryError, match=r"0\.9 of 80\.0 GB leaves no room .* 75\.0 GB are taken"):
        kv_cache_gb_for(0.9, total_bytes=80 * 2**30, free_bytes=5 * 2**30)


@examples(200)
@given(st.integers(1, 200), st.integers(0, 200), st.sampled_from([8, 16, 32]))
def test_every_split_of_the_longest_sequence_into_prompt_and_tail_fits(prompt: int, tail: int, block_size: int) -> None:
    least = blocks_for(prompt + tail, block_size) + 1
    assert blocks_for(prompt, block_size) + max(1, blocks_for(tail, block_size)) <= least
