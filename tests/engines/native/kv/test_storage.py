"""The KV memory: where keys and values go, and that nothing in it can break a score."""

import ctypes
import mmap
import sys

import psutil
import pytest
import torch

from motet.engines.native.cpu.memory import HUGE_PAGE_BYTES
from motet.engines.native.kv.storage import KEY_LIMIT, KEY_PADDING, KVLayout, KVStorage

CPU = torch.device("cpu")


def storage(dtype: torch.dtype = torch.float32) -> KVStorage:
    """Returns memory of two layers, three blocks of four tokens, and one head of two numbers."""
    return KVStorage(KVLayout(2, 4, 1, 2, dtype), 3, device=CPU)


def numbers(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns keys or values [tokens, 1, 2]."""
    return torch.tensor([[[value, value]] for value in values], dtype=dtype)


def resident_bytes(tensor: torch.Tensor) -> int:
    """Returns how much of a tensor has pages in main memory."""
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    num_bytes = tensor.data_ptr() + tensor.nbytes - begin
    pages = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_a_block_is_as_large_as_its_layout_says() -> None:
    layout = KVLayout(2, 4, 1, 2, torch.bfloat16)
    memory = KVStorage(layout, 3, device=CPU)
    used = 2 * memory.keys[:, : 3 * 4].numel() * memory.keys.element_size()
    assert used == 3 * layout.bytes_per_block == 3 * 64


def test_pages_become_memory_when_they_are_first_written() -> None:
    process, before = psutil.Process(), psutil.Process().memory_info().rss
    layout = KVLayout(4, 16, 8, 128, torch.bfloat16)
    memory = KVStorage(layout, 2**32 // layout.bytes_per_block, device=CPU)
    memory.keys[:, :16], memory.values[:, :16] = 1, 1
    assert not memory.keys[:, 16:32].any()
    assert process.memory_info().rss - before < 2**26, "4 GiB of KV of which one block of 4 layers is used"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux provides pages ahead")
def test_pages_are_provided_before_their_blocks_are_used() -> None:
    layout = KVLayout(4, 16, 8, 128, torch.bfloat16)
    memory = KVStorage(layout, 2**32 // layout.bytes_per_block, device=CPU)
    page = HUGE_PAGE_BYTES // (layout.bytes_per_block // 8)
    for num_blocks, end in [(0, page), (page // 2, page), (page // 2 + 1, page // 2 + 1 + page)]:
        memory.keys[3, 0] = 1
        memory.provide_pages(num_blocks)
        memory.wait_for_pages()
        provided = [resident_bytes(layer) for layer in (*memory.keys, *memory.values)]
        assert min(provided) >= end * HUGE_PAGE_BYTES // page
        assert max(provided) <= 3 * HUGE_PAGE_BYTES, "at most two pages more, as a layer does not begin with a page"
        assert memory.keys[3, :2].sum() == memory.keys[3, 0].numel(), "the content stays"
    memory.release_pages()
    assert resident_bytes(memory.keys[1]) == 0
    memory.provide_pages(page)
    memory.wait_for_pages()
    assert resident_bytes(memory.keys[1]) >= 2 * HUGE_PAGE_BYTES


def test_each_token_goes_to_its_slot_in_its_layer() -> None:
    memory = storage()
    memory.write(1, torch.tensor([5, 0, 11]), numbers(1, 2, 3), numbers(4, 5, 6))
    assert memory.keys[1, [5, 0, 11], 0, 0].tolist() == [1, 2, 3]
    assert memory.values[1, [5, 0, 11], 0, 1].tolist() == [4, 5, 6]
    assert int(memory.keys[1].count_nonzero()) == 6
    assert not memory.keys[0].any()
    assert not memory.values[0].any()


def test_the_padding_after_the_last_block_is_zero() -> None:
    memory = storage()
    memory.write(0, torch.arange(12), numbers(*range(1, 13)), numbers(*range(1, 13)))
    begin = memory.num_blocks * memory.block_size
    assert memory.keys.shape[1] == begin + KEY_PADDING
    assert not memory.keys[:, begin:].any()
    assert not memory.values[:, begin:].any()


def test_a_copy_takes_keys_and_values_of_all_layers() -> None:
    memory = storage()
    for layer in range(2):
        memory.write(layer, torch.tensor([0, 1]), numbers(1 + layer, 2), numbers(3, 4 + layer))
    memory.copy([0, 1], [7, 10])
    assert torch.equal(memory.keys[:, [7, 10]], memory.keys[:, [0, 1]])
    assert torch.equal(memory.values[:, [7, 10]], memory.values[:, [0, 1]])
    assert memory.keys[1, [7, 10], 0, 0].tolist() == [2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_stored_keys_and_values_are_finite_and_no_score_can_overflow(dtype: torch.dtype) -> None:
    memory = storage(dtype)
    largest = torch.finfo(dtype).max
    broken = numbers(float("nan"), float("inf"), float("-inf"), largest, 1.5, dtype=dtype)
    memory.write(0, torch.arange(5), broken, broken)
    keys, values = memory.keys[0, :5, 0, 0].double(), memory.values[0, :5, 0, 0]
    limit = float(torch.tensor(min(KEY_LIMIT, largest), dtype=dtype))
    assert keys.tolist() == [0, limit, -limit, limit, 1.5]
    assert values.double().tolist() == [0, largest, -largest, largest, 1.5]
