"""The size of an engine's KV cache. Unless it is set, it is chosen from the memory that was available when the server
started: pages become memory when they are used (`storage`), so a cache larger than this could end the engine later.

    default     DEFAULT_GB, but at most SHARE of an engine's part of the available memory, and at most what weights and
                ENGINE_BYTES leave of this part
    at least    one sequence of the model's maximum length, if MAX_SHARE of the part holds it; with a warning if weights
                and ENGINE_BYTES leave less
    set         as set; with a warning above the available memory, and an error above the machine's memory
"""

import logging
from dataclasses import dataclass

from motet.engines.native.kv.pool import blocks_for
from motet.errors import KVMemoryError
from motet.system.machine import GIB, MachineMemory

logger = logging.getLogger(__name__)

DEFAULT_GB = 2.0
SHARE = 0.5
MAX_SHARE = 0.8
ENGINE_BYTES = GIB // 2
"""Memory of an engine process without weights and KV: libraries, values between layers, the sampler."""


@dataclass(frozen=True)
class CacheSize:
    gb: float
    reason: str
    """Reason for the size, in words, for the start lines of the server and for errors."""


def cache_size(
    setting_gb: float | None, needed_bytes: int, *, memory: MachineMemory, num_engines: int, weights_bytes: int
) -> CacheSize:
    """Returns the size of one engine's cache in main memory. `needed_bytes`: memory for one sequence of the model's
    maximum length; `num_engines`: number of engines that share the memory, each with `weights_bytes` of weights. Raises
    KVMemoryError if the setting exceeds the memory of the machine."""
    available_gb = memory.available_bytes / GIB
    shared = f" for each of {num_engines} engines" if num_engines > 1 else ""
    if setting_gb is not None:
        if setting_gb * num_engines > memory.total_bytes / GIB:
            raise KVMemoryError(
                f"--kv-cache-gb {setting_gb:g}{shared} exceeds the memory of this machine, "
                f"{memory.total_bytes / GIB:.1f} GiB ({available_gb:.1f} are available): lower it"
            )
        if setting_gb * num_engines > available_gb:
            logger.warning(
                "--kv-cache-gb %g%s exceeds the available memory, %.1f GiB: the system can end the server when the "
                "cache fills",
                setting_gb,
                shared,
                available_gb,
            )
        return CacheSize(setting_gb, "set with --kv-cache-gb")
    divided = f", divided among {num_engines} engines" if num_engines > 1 else ""
    part_gb, needed_gb = available_gb / num_engines, needed_bytes / GIB
    remainder_gb = max(0.0, part_gb - (weights_bytes + ENGINE_BYTES) / GIB)
    default_gb = min(DEFAULT_GB, SHARE * part_gb, remainder_gb)
    if default_gb < needed_gb <= MAX_SHARE * part_gb:
        if needed_gb > remainder_gb:
            logger.warning(
                "one sequence of maximum length needs %.2f GiB of KV cache%s, and weights and engines leave %.2f GiB "
                "of the available memory: the system can end the server when the cache fills; lower --max-model-len",
                needed_gb,
                shared,
                remainder_gb,
            )
        return CacheSize(needed_gb, f"one sequence of maximum length; {available_gb:.1f} GiB of memory are available")
    if default_gb == DEFAULT_GB:
        return CacheSize(default_gb, "default")
    if default_gb == remainder_gb:
        taken = f"{weights_bytes / GIB:.2f} GiB of weights and {ENGINE_BYTES / GIB:g} GiB for the engine"
        return CacheSize(default_gb, f"{available_gb:.1f} GiB of available memory{divided}, without {taken}")
    return CacheSize(default_gb, f"{SHARE:.0%} of the {available_gb:.1f} GiB of available memory{divided}")


def kv_cache_gb_for(utilization: float, *, total_bytes: int, free_bytes: int) -> float:
    """Returns the size of the KV cache in GiB, such that the share `utilization` of the device's memory is used,
    including weights and other programs. The rest is for values between layers, graphs and the sampler."""
    used_bytes = total_bytes - free_bytes
    kv_bytes = utilization * total_bytes - used_bytes
    if kv_bytes > 0:
        return kv_bytes / GIB
    raise KVMemoryError(
        f"--gpu-memory-utilization {utilization:g} of {total_bytes / GIB:.1f} GiB leaves no memory for the KV cache: "
        f"{used_bytes / GIB:.1f} GiB are in use; raise it, end other programs, or use a smaller model"
    )


def num_blocks_for(
    kv_cache_gb: float, bytes_per_block: int, *, max_model_len: int, block_size: int, reason: str = ""
) -> int:
    """Returns the number of blocks in `kv_cache_gb` x 2^30 bytes. Raises KVMemoryError if a sequence of maximum length
    does not fit, because the oldest choice must always be able to continue. Prompt and tail are each rounded up to full
    blocks, so such a sequence can need one block more."""
    num_blocks = int(kv_cache_gb * GIB) // bytes_per_block
    needed = blocks_for(max_model_len, block_size) + 1
    if num_blocks >= needed:
        return num_blocks
    fits = (num_blocks - 1) * block_size
    why = f" ({reason})" if reason else ""
    shorter = f" or set --max-model-len to {fits} or less" if fits > 0 else ""
    raise KVMemoryError(
        f"{kv_cache_gb:g} GiB of KV cache{why} hold {num_blocks} blocks, but one sequence of {max_model_len} tokens "
        f"needs {needed} ({needed * bytes_per_block / GIB:.3f} GiB): raise --kv-cache-gb{shorter}"
    )
