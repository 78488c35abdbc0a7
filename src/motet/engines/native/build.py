"""From a config to an engine core: model, memory, fingerprint."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedConfig

from motet.config import EngineConfig
from motet.engines.native.backend import choose_backend
from motet.engines.native.core import CoreOptions, EngineCore, ModelRunner
from motet.engines.native.cuda.backend import cuda_backend
from motet.engines.native.kv.storage import KVLayout, KVStorage
from motet.engines.native.memory import kv_cache_gb_for, num_blocks_for
from motet.engines.native.model import load_model, read_config, read_shape, resolve_device, resolve_dtype
from motet.engines.native.reach import facts_of, start_transfers
from motet.errors import ConfigError, KVMemoryError
from motet.grammar.compiled import Grammars
from motet.ids import ModelName
from motet.text.tokenizer import Tokenizer
from motet.transfer.layout import KVFacts
from motet.transfer.proof import Proof
from motet.types import EngineInfo, Role

BLOCK_SIZES = (8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Parts:
    """What a core is made of."""

    info: EngineInfo
    runner: ModelRunner
    storage: KVStorage
    options: CoreOptions
    facts: KVFacts
    """What another worker's KV must be like to be of use here."""


def build_core(config: EngineConfig, *, pid: int | None = None) -> EngineCore:
    """A core ready to serve; raises what `build_parts` raises."""
    parts = build_parts(config, pid=pid)
    if config.role is Role.BOTH:
        return EngineCore(parts.info, parts.runner, parts.options)
    proof = Proof(parts.info.num_blocks)
    transfers = start_transfers(config, parts.facts, parts.storage, proof)
    info = msgspec.structs.replace(parts.info, transfer=transfers.address)
    return EngineCore(info, parts.runner, parts.options, proof=proof, transfers=transfers)


def build_parts(config: EngineConfig, *, pid: int | None = None) -> Parts:
    """Raises StartupError subclasses, the cheap ones before any weight is read."""
    hf_config = _checked(config)
    folder = Path(config.model_path)
    device, dtype = resolve_device(config.device), resolve_dtype(config.dtype, hf_config)
    shape = read_shape(folder, hf_config)
    max_model_len = _max_model_len(config.max_model_len, shape.max_model_len)
    layout = KVLayout(shape.num_layers, config.block_size, shape.num_kv_heads, shape.head_dim, dtype)
    blocks_in = partial(
        num_blocks_for,
        bytes_per_block=layout.bytes_per_block,
        max_model_len=max_model_len,
        block_size=config.block_size,
    )
    if config.gpu_memory_utilization is None:
        blocks_in(config.kv_cache_gb)
    model = load_model(folder, hf_config, dtype=dtype, device=device)
    num_blocks = blocks_in(_kv_cache_gb(config, device))
    facts = facts_of(model, layout, config.quantization)
    storage = _allocated(layout, num_blocks, device)
    if device.type == "cuda" and config.kernels == "auto" and config.quantization == "none":
        backend = cuda_backend(model, storage, config, max_model_len=max_model_len)
    else:
        backend = choose_backend(
            model,
            storage,
            kernels=config.kernels,
            max_model_len=max_model_len,
            quantization=config.quantization,
        )
    info = EngineInfo(
        model=ModelName(config.model_name),
        max_model_len=max_model_len,
        vocab_size=shape.vocab_size,
        block_size=config.block_size,
        num_blocks=num_blocks,
        bytes_per_block=layout.bytes_per_block,
        max_num_seqs=config.max_num_seqs,
        role=config.role,
        eos_token_ids=shape.eos_token_ids,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        fingerprint=backend.fingerprint,
        pid=pid,
    )
    grammars = Grammars(
        partial(Tokenizer.load, Path(config.tokenizer_path or config.model_path)),
        vocab_size=shape.vocab_size,
        eos_token_ids=shape.eos_token_ids,
    )
    options = CoreOptions(
        config.max_num_batched_tokens,
        config.prefix_cache,
        config.cache_answers,
        lease_s=config.lease_s,
        grammars=grammars,
    )
    return Parts(info, backend.runner, storage, options, facts)


def _checked(config: EngineConfig) -> PreTrainedConfig:
    if config.block_size not in BLOCK_SIZES:
        raise ConfigError(f"--block-size is {config.block_size}; use one of {', '.join(map(str, BLOCK_SIZES))}")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens is {config.max_num_batched_tokens}; it must be at least --max-num-seqs, "
            f"{config.max_num_seqs}, or choices would wait for each other"
        )
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    return read_config(Path(config.model_path))


def _kv_cache_gb(config: EngineConfig, device: torch.device) -> float:
    """Asked once the weights are loaded."""
    if config.gpu_memory_utilization is None:
        return config.kv_cache_gb
    if device.type != "cuda":
        raise ConfigError(f"--gpu-memory-utilization: the device is {device}; give --kv-cache-gb")
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return kv_cache_gb_for(config.gpu_memory_utilization, total_bytes=total_bytes, free_bytes=free_bytes)


def _allocated(layout: KVLayout, num_blocks: int, device: torch.device) -> KVStorage:
    try:
        return KVStorage(layout, num_blocks, device)
    except RuntimeError as exc:  # torch has no narrower one for the CPU
        gb = num_blocks * layout.bytes_per_block / 2**30
        raise KVMemoryError(f"{device} has no {gb:g} GB for the KV cache: lower --kv-cache-gb ({exc})") from exc


def _max_model_len(asked: int | None, possible: int) -> int:
    if asked is None:
        return possible
    if not 2 <= asked <= possible:
        raise ConfigError(f"--max-model-len is {asked}; this model allows 2 to {possible}")
    return asked
