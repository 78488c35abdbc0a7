"""The memory of the KV cache.

    keys[layer], values[layer]      [(num_blocks + slack) * block_size, num_kv_heads, head_dim]
    slot of position p of a table   table[p // block_size] * block_size + p % block_size

The slack after the last block is zero and never written. Block `num_blocks` pads the shorter block tables of a batch,
and a view of a table can extend beyond the end of the table, where the keys are masked. A mask adds minus infinity,
which cannot undo a NaN or an infinite score, and a weight of 0 cannot undo an infinite value. All stored numbers are
therefore finite, and keys are small enough for every score to be finite, so that invalid KV of one group does not
affect other groups.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from motet.engines.native.cpu.memory import HUGE_PAGE_BYTES, huge_pages, populate_pages, release_pages
from motet.transfer.proof import Proof
from motet.transfer.transport import KVFacts, RegisteredMemory

KEY_PADDING = 512
"""Maximum number of keys that a view can have beyond the end of a table."""
KEY_LIMIT = 1e20
"""Keys are clamped to this magnitude, so that scores are finite for queries up to 1e16. Models have keys below 1e4."""


@dataclass(frozen=True)
class KVLayout:
    """Sizes and dtype of one block."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Size of the keys and values of one block in all layers."""
        values = 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim
        return values * self.dtype.itemsize

    def facts(self, model_digest: str, quantization: str) -> KVFacts:
        """Returns the facts that must be equal on every worker that uses this KV."""
        return KVFacts(
            model_digest=model_digest,
            quantization=quantization,
            dtype=str(self.dtype).removeprefix("torch."),
            block_size=self.block_size,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )


class KVStorage:
    """Keys and values of all layers, allocated once, on one device.

    On the CPU only addresses are reserved, so an engine that runs few sequences at once uses a fraction of its cache:
    the pool takes blocks that were freed, and then blocks next to them, before it takes blocks that were never used. A
    thread provides the memory of the next blocks before they are written, as a first write to a page is slow."""

    def __init__(self, layout: KVLayout, num_blocks: int, *, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.key_limit = min(KEY_LIMIT, torch.finfo(layout.dtype).max)
        self.block_size = layout.block_size
        slots = num_blocks * layout.block_size + KEY_PADDING
        shape = (layout.num_layers, slots, layout.num_kv_heads, layout.head_dim)
        self.keys = _zeros(shape, layout.dtype, device=device)
        self.values = _zeros(shape, layout.dtype, device=device)
        self._ahead = -(-HUGE_PAGE_BYTES * layout.num_layers * 2 // layout.bytes_per_block)
        """Number of blocks whose keys of one layer fill a huge page."""
        self._provided = 0 if device.type == "cpu" else num_blocks
        """Number of blocks, from the first on, whose memory was provided or will soon be."""
        self._thread = ThreadPoolExecutor(1, "kv-pages")

    @property
    def num_layers(self) -> int:
        return len(self.keys)

    def memory(self, proof: Proof) -> RegisteredMemory:
        """Returns the addresses of the memory and of the proof, for readers in other processes."""
        layers = [*self.keys, *self.values]
        _, kv_heads, head_dim = layers[0].shape
        return RegisteredMemory(
            regions=tuple(layer.data_ptr() for layer in layers),
            region_block_bytes=self.block_size * kv_heads * head_dim * layers[0].itemsize,
            num_blocks=self.num_blocks,
            device=self.keys.get_device(),
            proof=proof.address,
            proof_entries=proof.num_entries,
        )

    def provide_pages(self, num_blocks: int) -> None:
        """Provides memory for blocks beyond the first `num_blocks`, in a thread. Costs little if it was provided
        before, so it is called whenever blocks are taken."""
        if self._provided >= min(num_blocks + self._ahead // 2, self.num_blocks):
            return
        begin, self._provided = self._provided, min(num_blocks + self._ahead, self.num_blocks)
        self._thread.submit(self._populate, slice(begin * self.block_size, self._provided * self.block_size))

    def wait_for_pages(self) -> None:
        """Returns when all requested memory is provided."""
        self._thread.submit(lambda: None).result()

    def _populate(self, slots: slice) -> None:
        for layer in (*self.keys, *self.values):
            populate_pages(layer[slots])

    def release_pages(self) -> None:
        """Returns the memory to the system until it is next written, on the CPU only. The content is lost."""
        self.wait_for_pages()
        release_pages(self.keys)
        release_pages(self.values)
        self._provided = 0

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores key and value [num_tokens, num_kv_heads, head_dim] of one layer at `slots` [num_tokens] int64."""
        limit = self.key_limit
        self.keys[layer].index_copy_(0, slots, torch.nan_to_num(key).clamp_(-limit, limit))
        self.values[layer].index_copy_(0, slots, torch.nan_to_num(value))

    @torch.inference_mode()
    def copy(self, source: list[int], target: list[int]) -> None:
        """Copies keys and values of the slots `source` to the slots `target`, in all layers."""
        sources, targets = torch.tensor([source, target], dtype=torch.int64).to(self.keys.device).unbind()
        self.keys[:, targets] = self.keys[:, sources]
        self.values[:, targets] = self.values[:, sources]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, *, device: torch.device) -> Tensor:
    """Returns zeros. Raises RuntimeError or OSError if a GPU has too little memory, or a machine too few addresses."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return huge_pages(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
