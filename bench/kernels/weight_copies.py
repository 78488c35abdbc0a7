"""Copies of weights for timed products: enough copies to come from memory, in the same kind of memory as the
engine's."""

import torch

from motet.engines.native.cpu.panels import Arena

CACHED_BYTES = 2**28
"""Size in bytes of all copies of bf16 weights together: many times a last-level cache, also with int8 weights."""


def num_copies(depth: int, columns: int) -> int:
    return max(2, -(-CACHED_BYTES // (2 * depth * columns)))


def weights_in_huge_pages(depth: int, columns: int) -> list[torch.Tensor]:
    """Returns copies of random weights [columns, depth] bf16 in huge pages, like the engine's weights. Other memory has
    huge pages only by chance."""
    count = num_copies(depth, columns)
    arena = Arena(2 * depth * columns * count, count)
    weights = [arena.take((columns, depth), torch.bfloat16) for _ in range(count)]
    for weight in weights:
        weight.normal_()
    return weights
