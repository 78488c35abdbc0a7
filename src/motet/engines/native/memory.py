"""How many KV blocks fit, and whether that is enough for one sequence of the greatest length."""

from motet.engines.native.sequence import blocks_for
from motet.errors import KVMemoryError

GB = 2**30


def kv_cache_gb_for(utilization: float, *, total_bytes: int, free_bytes: int) -> float:
    """GB for KV on a device of which `utilization` may be filled and on which the weights lie already, and whatever
    other programs keep there. What is left beside that is for the values between layers, graphs and the sampler."""
    taken = total_bytes - free_bytes
    room = utilization * total_bytes - taken
    if room > 0:
        return room / GB
    raise KVMemoryError(
        f"--gpu-memory-utilization {utilization:g} of {total_bytes / GB:.1f} GB leaves no room for KV: "
        f"{taken / GB:.1f} GB are taken; raise it, end other programs, or take a smaller model"
    )


def num_blocks_for(kv_cache_gb: float, bytes_per_block: int, *, max_model_len: int, block_size: int) -> int:
    """Blocks in `kv_cache_gb` x 2^30 bytes. A prompt and its tail are rounded up apart, hence one block more than a
    sequence in one piece would need; with fewer, the oldest choice could not get on: KVMemoryError."""
    num_blocks = int(kv_cache_gb * 2**30) // bytes_per_block
    needed = blocks_for(max_model_len, block_size) + 1
    if num_blocks >= needed:
        return num_blocks
    fits = max(0, num_blocks - 1) * block_size
    raise KVMemoryError(
        f"{kv_cache_gb:g} GB of KV cache hold {num_blocks} blocks, but one sequence of {max_model_len} tokens needs "
        f"{needed} ({needed * bytes_per_block / 2**30:.3f} GB): raise --kv-cache-gb or set --max-model-len to {fits} "
        "or less"
    )
