"""The memory of the KV cache.

    keys[layer], values[layer]      [(num_blocks + slack) * block_size, num_kv_heads, head_dim]
    slot of position p of a table   table[p // block_size] * block_size + p % block_size

The slack behind the last block is zero and never written: block `num_blocks` pads tables that are shorter than a batch,
and a view of a table may run past its end (those keys are masked). All that is ever stored is finite: a NaN or Inf in a
masked key would otherwise reach the neighbours, because minus infinity plus NaN is NaN.
"""

import torch

KEY_PADDING = 512
"""The most keys a view may run past the end of a table."""


class KVStorage:
    """Allocated once, zeroed, on one device."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        slots = num_blocks * block_size + KEY_PADDING
        shape = (num_layers, slots, num_kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def zero_block(self) -> int:
        return self.num_blocks

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores key, value [num_tokens, num_kv_heads, head_dim] at `slots` [num_tokens] int64."""
        self.keys[layer].index_copy_(0, slots, torch.nan_to_num(key))
        self.values[layer].index_copy_(0, slots, torch.nan_to_num(value))

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies slots [count] int64 to slots, in all layers."""
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]


def bytes_per_block(*, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """KV of one block in all layers."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize
