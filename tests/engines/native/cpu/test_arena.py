"""An arena provides parts of one piece of memory."""

import torch

from motet.engines.native.cpu.panels import Arena


def test_parts_of_an_arena_are_apart_aligned_and_zero() -> None:
    arena = Arena(2 * (3 * 5 + 7) + 4 * 2, 3)
    first = arena.take((3, 5), torch.bfloat16)
    second = arena.take((7,), torch.bfloat16)
    third = arena.take((2,), torch.float32)
    first.fill_(1)
    third.fill_(3)
    assert second.eq(0).all() and first.eq(1).all()
    assert all(part.data_ptr() % 64 == 0 for part in (first, second, third))


def test_a_part_outlives_its_arena() -> None:
    part = Arena(4, 1).take((1,), torch.float32)
    part.fill_(5)
    assert part.item() == 5
