"""Builds an engine core from its settings: model, KV memory, backend, fingerprint."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedModel

from motet.engine_info import EngineInfo
from motet.engines.native.adapters.adapter_loader import AdapterLoader
from motet.engines.native.checks.fingerprint import fingerprint, model_digest, operators_agree
from motet.engines.native.checks.reference import (
    CLOSE,
    INT8_ROUNDING,
    MAX_RATIO,
    NUM_TOKENS,
    compare,
    reference_pass,
    rounding,
)
from motet.engines.native.compiled_kernels import digest, library, missing_kernels, running_kind
from motet.engines.native.core import CoreOptions, EngineCore
from motet.engines.native.cpu.cpu_runner import CpuRunner, PackedWeights
from motet.engines.native.cpu.norm_reader import StructureError
from motet.engines.native.cpu.packed_adapters import PackedAdapters
from motet.engines.native.cpu.packed_weights import PackedModel, structure_for
from motet.engines.native.cuda.cuda_runner import cuda_backend
from motet.engines.native.kv.cache_size import DEFAULT_GB, CacheSize, cache_size, kv_cache_gb_for, num_blocks_for
from motet.engines.native.kv.pool import blocks_for
from motet.engines.native.kv.storage import KVLayout, KVStorage
from motet.engines.native.model import (
    ModelShape,
    has_experts,
    has_padded_experts,
    in_one_line,
    load_model,
    read_config,
    read_shape,
    resolve_device,
    resolve_dtype,
    weights_in_memory,
)
from motet.engines.native.model_weights import PublishedForm, TensorWeights
from motet.engines.native.rope import select_factors
from motet.engines.native.step.run import Backend, ModelRunner, TorchRunner
from motet.engines.native.weight_loader import StartWeights, WeightLoader
from motet.errors import ConfigError, KVMemoryError, MotetError, UnsupportedModelError
from motet.grammar.compiled_grammar import Grammars
from motet.ids import ModelName, new_engine_id
from motet.log import cut
from motet.models.weight_digest import start_weights_digest
from motet.settings.engine_config import EngineConfig
from motet.settings.server_config import cache_folder, environment
from motet.system.machine import GIB, read_memory
from motet.text.tokenizer import Tokenizer
from motet.transfer.backends.start import start_transport
from motet.transfer.proof import Proof
from motet.transfer.thread import TransferSettings, TransferThread
from motet.transfer.ticket import is_loopback
from motet.transfer.transport import KVFacts, RegisteredMemory
from motet.types import Role

logger = logging.getLogger(__name__)

MAX_NOTE_CHARS = 800
"""Maximum length of the sentence about the kernels: it can quote a compiler, and travels in reports to gateways."""


@dataclass(frozen=True)
class Parts:
    """The parts of a core, and the other objects that its process needs."""

    info: EngineInfo
    runner: ModelRunner
    storage: KVStorage
    options: CoreOptions
    weights: WeightLoader
    adapters: AdapterLoader
    facts: KVFacts
    """Facts that must be equal on every worker whose KV this engine uses."""


def core_over(parts: Parts, config: EngineConfig) -> EngineCore:
    """Returns a core made of these parts. Its role decides if it has transfers."""
    provide = parts.storage.provide_pages
    provide(0)
    if config.role is Role.BOTH:
        return EngineCore(parts.info, parts.runner, options=parts.options, on_take=provide)
    proof = Proof(parts.info.num_blocks)
    transfers = start_transfers(config, parts.facts, memory=parts.storage.memory(proof))
    info = msgspec.structs.replace(parts.info, transfer=transfers.address, transfer_backend=transfers.kind)
    return EngineCore(info, parts.runner, options=parts.options, proof=proof, transfers=transfers, on_take=provide)


def start_transfers(config: EngineConfig, facts: KVFacts, *, memory: RegisteredMemory) -> TransferThread:
    """Makes the KV memory readable for other workers. Raises ConfigError if the address cannot be bound, and
    StartupError if no transport can start."""
    if not (is_loopback(config.side_channel_host) or config.cluster_key):
        logger.warning(
            "--cluster-key is not set: every host that reaches %s is trusted as a worker of this cluster",
            config.side_channel_host,
        )
    settings = TransferSettings(
        engine_id=new_engine_id(config.role),
        host=config.side_channel_host,
        port=config.side_channel_port or 0,
        cluster_key=config.cluster_key,
        pull_timeout_s=config.pull_timeout_s,
    )
    backend, name, host = config.kv_transfer_backend, settings.engine_id, settings.host
    transfers = TransferThread(
        settings,
        facts,
        memory=memory,
        make_transport=lambda poller: start_transport(backend, name, memory=memory, host=host, poller=poller),
    )
    logger.info("KV transfers use %s", transfers.kind)
    return transfers


def build_parts(config: EngineConfig, *, pid: int | None = None) -> Parts:
    """Loads the model, and allocates everything that a core needs. Raises StartupError for settings or a model that
    cannot work. Errors that do not depend on the weights are raised before any weight is read."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    folder = Path(config.model_path)
    hf_config = read_config(folder)
    device, dtype = resolve_device(config.device), resolve_dtype(config.dtype, hf_config)
    shape = read_shape(folder, hf_config, generation=Path(config.generation_path or folder))
    max_model_len = max_model_len_of(config.max_model_len, shape)
    select_factors(hf_config, max_model_len)
    layout = KVLayout(shape.num_layers, config.block_size, shape.num_kv_heads, shape.head_dim, dtype)
    needs = MemoryNeeds(max_model_len, weights_in_memory(folder, hf_config, dtype=dtype))
    choose = partial(choose_blocks, config, layout, needs=needs, device=device)
    if (utilization := _gpu_utilization(config, device)) is None:
        num_blocks, reason = choose()
    cache = cache_folder(environment())
    weights = start_weights_digest([folder], cache)
    load = partial(load_model, folder, hf_config, dtype=dtype, device=device)
    model = load()
    model_id = model_digest(hf_config, weights.result())
    if utilization is not None:  # weights reduce the free memory of a GPU
        num_blocks, reason = choose()
    facts, published = layout.facts(model_id, config.quantization), PublishedForm.of(model)
    storage = _allocated(layout, num_blocks, device=device)
    backend = proven_backend(model, storage, config=config, max_model_len=max_model_len, reload=load)
    info = EngineInfo(
        model=ModelName(config.model_name),
        root=config.model_root,
        max_model_len=max_model_len,
        vocab_size=shape.vocab_size,
        block_size=config.block_size,
        num_blocks=num_blocks,
        bytes_per_block=layout.bytes_per_block,
        max_num_seqs=config.max_num_seqs,
        num_weights=sum(map(math.prod, backend.weights.shapes.values())),
        role=config.role,
        shares_prompts=config.prefix_cache,
        eos_token_ids=shape.eos_token_ids,
        default_sampling_params=dict(config.default_sampling_params),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        kernels=backend.kernels,
        kernels_note=cut(backend.note, MAX_NOTE_CHARS),
        kv_cache_reason=reason,
        fingerprint=fingerprint(backend.operators, backend.same, dtype=dtype, device=device, model=model_id),
        model_digest=model_id,
        pid=pid,
        max_adapters=0 if backend.adapters is None else config.max_adapters,
        max_adapter_rank=0 if backend.adapters is None else config.max_adapter_rank,
    )
    options = _options_of(config, shape, device=device, bytes_per_block=layout.bytes_per_block)
    start = StartWeights(folder, weights.result(), load)
    loader = WeightLoader(
        backend.weights, start, name_of=partial(model_digest, hf_config), cache=cache, published=published
    )
    served = config.model_root or config.model_name, config.model_path
    adapters = AdapterLoader(backend.adapters, max_rank=config.max_adapter_rank, served=served)
    options = replace(options, adapters=adapters.load_all(config.adapters, maximum=info.max_adapters))
    return Parts(info, backend.runner, storage, options, loader, adapters, facts)


def _options_of(config: EngineConfig, shape: ModelShape, *, device: torch.device, bytes_per_block: int) -> CoreOptions:
    return CoreOptions(
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefix_cache=config.prefix_cache,
        cache_answers=config.cache_answers,
        lease_s=config.lease_s,
        grammars=Grammars(
            partial(Tokenizer.load, Path(config.tokenizer_path or config.model_path)),
            vocab_size=shape.vocab_size,
            eos_token_ids=shape.eos_token_ids,
        ),
        draft_tokens=config.draft_tokens if device.type == "cpu" else 0,  # on a GPU no CUDA graph has rows for drafts
        draft_from_history=config.draft_from_history,
        max_kept_blocks=None if config.keep_gb is None else int(config.keep_gb * GIB) // bytes_per_block,
    )


def proven_backend(
    model: PreTrainedModel,
    storage: KVStorage,
    *,
    config: EngineConfig,
    max_model_len: int,
    reload: Callable[[], PreTrainedModel],
) -> Backend:
    """Returns the first backend that computes the logits of transformers (`checks.reference`): the fastest one that the
    settings allow, then torch's operators. `reload` loads the model again, because a backend can change it. Raises
    ConfigError if the settings require a backend that cannot run the model, and UnsupportedModelError if no backend
    computes it."""
    try:
        num_tokens = min(NUM_TOKENS, max_model_len, storage.num_blocks * storage.block_size)
        reference = reference_pass(
            model, num_tokens=num_tokens, vocab_size=model.config.vocab_size, by_median=has_experts(model.config)
        )
        int8, limit, wrong = config.quantization == "int8", CLOSE[storage.keys.dtype], ""
        for kernels in ("auto", "torch") if config.kernels == "auto" and not int8 else (config.kernels,):
            backend = _backend(model, storage, config=config, kernels=kernels, max_model_len=max_model_len)
            found = compare(backend.runner, reference, storage=storage)
            if not found.agrees(limit):
                model = reload()
                limit = max(limit, MAX_RATIO * rounding(model, reference) + (INT8_ROUNDING if int8 else 0.0))
            if found.agrees(limit):
                logger.info("%s: %s", backend.kernels, found.description(limit))
                return replace(backend, note=_note(wrong) if wrong else backend.note, same=backend.same and found.same)
            wrong = found.description(limit)
            logger.warning("%s: %s", backend.kernels, wrong)
    except MotetError:
        raise
    except Exception as exc:  # transformers has models that its own attention interface, or this engine, cannot run
        wrong = in_one_line(exc)
        logger.info("a model cannot be run", exc_info=exc)
    raise UnsupportedModelError(f"{config.model_path} cannot be served: {wrong}")


def _backend(
    model: PreTrainedModel, storage: KVStorage, *, config: EngineConfig, kernels: str, max_model_len: int
) -> Backend:
    quantization = config.quantization
    if storage.keys.device.type == "cuda" and kernels == "auto" and quantization == "none":
        try:
            return cuda_backend(model, storage, config=config, max_model_len=max_model_len)
        except StructureError as error:
            kernels, note = "torch", f"The GPU kernels do not implement {error}, so torch's operators run instead."
            logger.warning("%s", note)
            found = choose_backend(model, storage, kernels=kernels, max_model_len=max_model_len)
            return replace(found, note=note)
    return choose_backend(model, storage, kernels=kernels, max_model_len=max_model_len, quantization=quantization)


def choose_backend(
    model: PreTrainedModel, storage: KVStorage, *, kernels: str, max_model_len: int, quantization: str = "none"
) -> Backend:
    """Returns the compiled kernels if they can run the model, and otherwise torch's operators. The compiled kernels
    take the weights out of the model, and `checks.reference.compare` must show that they compute equal bits.

    `kernels` is `auto`, `compiled` or `torch`, `quantization` is `none` or `int8`. Raises ConfigError if the compiled
    kernels are required and cannot run the model."""
    dtype, device = storage.keys.dtype, storage.keys.device
    found = library()
    structure = None
    if kernels != "torch":
        structure = structure_for(found, model, max_positions=max_model_len, dtype=dtype, device=device)
    reason = structure if isinstance(structure, str) else None
    if kernels == "compiled" and reason is not None:
        raise ConfigError(f"--kernels compiled: {reason}; use auto or torch")
    int8 = quantization == "int8"
    if int8 and reason is None and dtype != torch.bfloat16:
        reason = f"with int8 weights the kernels compute in bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if int8 and (reason is not None or kernels == "torch"):
        raise ConfigError(f"--quantization int8 needs the compiled kernels: {reason or '--kernels torch was given'}")
    if structure is None or isinstance(structure, str) or found is None:
        note = _note(reason) if kernels == "auto" and device.type == "cpu" else ""
        same = has_padded_experts(model) and operators_agree(
            model, head_dim=storage.keys.shape[-1], dtype=dtype, device=device
        )
        sampling = f"-sampling-{digest()}" if device.type == "cpu" and found is not None else ""
        operators = f"torch-{torch.__version__}{sampling}"
        by_torch = TorchRunner(model, storage)
        return Backend(by_torch, operators, same, TensorWeights.of(model), "torch", by_torch.adapters, note)
    packed = PackedModel(model, storage, max_positions=max_model_len, kernels=found, structure=structure, int8=int8)
    runner = CpuRunner(packed, storage, num_threads=torch.get_num_threads(), kernels=found)
    operators = f"kernels-{digest()}{'-int8' if int8 else ''}"
    adapters = PackedAdapters(model, packed, kernels=found)
    return Backend(runner, operators, True, PackedWeights(runner), running_kind() or "", adapters)


def _note(reason: str | None) -> str:
    """Returns a sentence that says why the compiled kernels do not run a model, and the cost or the remedy."""
    return missing_kernels() or (
        f"The compiled kernels cannot run this model ({reason}), so torch's operators run instead, which are several "
        "times slower."
    )


@dataclass(frozen=True)
class MemoryNeeds:
    """The facts about a model, apart from its KV layout, on which the size of the KV cache depends."""

    max_model_len: int
    weights_bytes: int


def choose_blocks(
    config: EngineConfig, layout: KVLayout, *, needs: MemoryNeeds, device: torch.device
) -> tuple[int, str]:
    """Returns the number of KV blocks, and the reason for it in words. Raises KVMemoryError."""
    size = _cache_size(config, layout, needs=needs, device=device)
    num_blocks = num_blocks_for(
        size.gb,
        layout.bytes_per_block,
        max_model_len=needs.max_model_len,
        block_size=config.block_size,
        reason="" if config.kv_cache_gb is not None else size.reason,
    )
    return num_blocks, size.reason


def _gpu_utilization(config: EngineConfig, device: torch.device) -> float | None:
    """Returns the fraction of the GPU's memory for the engine. None if it is not set, and on a CPU."""
    return config.gpu_memory_utilization if device.type == "cuda" else None


def _cache_size(config: EngineConfig, layout: KVLayout, *, needs: MemoryNeeds, device: torch.device) -> CacheSize:
    if (utilization := _gpu_utilization(config, device)) is not None:
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        gb = kv_cache_gb_for(utilization, total_bytes=total_bytes, free_bytes=free_bytes)
        return CacheSize(gb, f"--gpu-memory-utilization {utilization:g}")
    if config.gpu_memory_utilization is not None:
        logger.warning("--gpu-memory-utilization has no effect: the device is %s; use --kv-cache-gb", device)
    if device.type != "cpu":
        return CacheSize(
            config.kv_cache_gb or DEFAULT_GB, "set with --kv-cache-gb" if config.kv_cache_gb else "default"
        )
    memory = read_memory()
    if config.available_bytes is not None:
        memory = replace(memory, available_bytes=config.available_bytes)
    return cache_size(
        config.kv_cache_gb,
        (blocks_for(needs.max_model_len, config.block_size) + 1) * layout.bytes_per_block,
        memory=memory,
        num_engines=config.num_engines,
        weights_bytes=needs.weights_bytes,
    )


def _allocated(layout: KVLayout, num_blocks: int, *, device: torch.device) -> KVStorage:
    try:
        return KVStorage(layout, num_blocks, device=device)
    except (RuntimeError, OSError) as exc:  # the GPU or the machine has too little free memory
        gb = num_blocks * layout.bytes_per_block / GIB
        raise KVMemoryError(
            f"{device} cannot allocate {gb:g} GB for the KV cache: lower --kv-cache-gb ({exc})"
        ) from exc


def max_model_len_of(setting: int | None, shape: ModelShape) -> int:
    """Returns the setting if there is one, and otherwise the default of the model."""
    if setting is None:
        return shape.default_length
    if not 2 <= setting <= shape.max_model_len:
        raise ConfigError(f"--max-model-len is {setting}; this model allows 2 to {shape.max_model_len}")
    return setting
