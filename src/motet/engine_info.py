"""The facts that an engine reports about itself: its model, sizes, kind and weights."""

from enum import StrEnum

import msgspec

from motet.ids import ModelName
from motet.transfer.ticket import TransferAddress, TransportKind
from motet.types import Role


class EngineKind(StrEnum):
    """The software of an engine. KV passes only between engines of the same kind."""

    MOTET = "motet"
    VLLM = "vllm"
    OPENAI = "openai"
    """The server takes texts and not tokens, so it is a worker but not an `Engine`."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a worker serves in addition to its base model: an adapter, or another name."""

    name: ModelName
    root: str = ""
    parent: ModelName | None = None
    max_model_len: int


FIRST_VERSION = "0"
"""Version of the weights, and of the adapters, with which an engine starts."""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter that an engine has loaded."""

    name: ModelName
    """The name in the `model` field of requests for the adapter."""
    root: str = ""
    """Folder or other source of the adapter, as given; empty for an adapter that was sent from memory."""
    digest: str
    """Digest of the adapter's tensors, scaling and target modules, equal on all engines that have loaded it."""
    version: str = FIRST_VERSION
    """Version of the adapter's weights, as named by the client that sent them; "0" for an adapter from `--adapter`."""
    rank: int


UNKNOWN_VOCABULARY = 2**31 - 1
"""`vocab_size` of an engine that does not report it; such an engine refuses unknown tokens itself."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about an engine, which change only with its weights. Some kinds do not report fields with a default."""

    model: ModelName
    root: str = ""
    """Name on the hub or path that the model was loaded from; empty if the engine does not report it."""
    max_model_len: int
    """Maximum number of tokens of prompt and output together."""
    vocab_size: int = UNKNOWN_VOCABULARY
    block_size: int
    num_blocks: int
    bytes_per_block: int = 0
    max_num_seqs: int
    num_weights: int = 0
    """Number of elements in all tensors of a complete checkpoint; 0 if the engine does not report it."""
    role: Role
    eos_token_ids: tuple[int, ...] = ()
    default_sampling_params: dict[str, int | float] | None = None
    """Values of sampling fields that requests omit, by the fields' names in `SamplingParams`. None if the engine does
    not report them."""
    dtype: str = ""
    device: str = ""
    kernels: str = ""
    """Implementation that computes: `avx512` or `avx2` for the compiled kernels, `torch`, or `cuda`."""
    kernels_note: str = ""
    """Reason why the compiled kernels do not run, with the remedy; empty if they run or were not requested."""
    kv_cache_reason: str = ""
    """Reason for the size of the KV cache, in words."""
    fingerprint: str = ""
    """Engines with equal fingerprints that end in `-same` generate equal tokens for equal requests."""
    model_digest: str = ""
    """Digest of the model's configuration and weights, the same on any hardware; empty if the engine reports none."""
    weight_version: str = FIRST_VERSION
    """Version of the weights, as named by the client that sent them; "0" for the initial weights."""
    block_weights: str = ""
    """Name of the weights in the names of the engine's blocks (`block_names`); empty for the initial weights."""
    pid: int | None = None
    """Process id; None for a process on another machine."""
    transfer: TransferAddress | None = None
    """Address of the engine's side channel; None for an engine that does not transfer KV."""
    transfer_backend: TransportKind | None = None
    """Transport of the engine's KV; None for an engine that does not report it."""
    kind: EngineKind = EngineKind.MOTET
    shares_prompts: bool = False
    """True if groups share a prompt that the engine is still computing for the first of them."""
    ticket_readers: int = 64
    adapters: tuple[AdapterInfo, ...] = ()
    """The loaded LoRA adapters, in the order in which they were loaded."""
    max_adapters: int = 0
    """Maximum number of loaded adapters; 0 for an engine that loads none."""
    max_adapter_rank: int = 0
    """Maximum rank of an adapter; 0 for an engine that does not report it."""


def adapter_in(info: EngineInfo, model: str) -> AdapterInfo | None:
    """Returns the adapter with this name; None for the base model and for unknown names."""
    return next((adapter for adapter in info.adapters if adapter.name == model), None)


def weights_of(info: EngineInfo, model: str) -> str:
    """Returns a digest of the weights that generate for this model: the base model, and the adapter if it is one."""
    adapter = adapter_in(info, model)
    return info.model_digest if adapter is None else adapted(info.model_digest, adapter)


def adapted(model_digest: str, adapter: AdapterInfo) -> str:
    """Returns the digest of a base model's weights with an adapter. It has the name, because an adapter can be replaced
    while another one with equal tensors stays."""
    return f"{model_digest}+{adapter.name}={adapter.digest}"


def fingerprint_of(info: EngineInfo, model: str) -> str:
    """Returns the fingerprint of the answers of this model, which contains the digest of an adapter. Empty if the
    engine does not report a fingerprint."""
    adapter = adapter_in(info, model)
    return f"adapter-{adapter.digest[:16]}_{info.fingerprint}" if adapter and info.fingerprint else info.fingerprint


def version_of(info: EngineInfo, model: str) -> str:
    """Returns the version of the weights of this model: the adapter's own version, or the base model's."""
    adapter = adapter_in(info, model)
    return info.weight_version if adapter is None else adapter.version


def kv_weights(info: EngineInfo, adapter_digest: str) -> str:
    """Returns the name of the weights in a ticket for KV that was computed with this adapter; empty for none."""
    return f"{info.block_weights}+{adapter_digest}" if adapter_digest else info.block_weights
