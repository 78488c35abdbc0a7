"""Makes an engine's KV memory reachable for other workers: the transfer thread, and what describes the memory."""

import json
import logging
from hashlib import blake2b

import torch
from transformers import PreTrainedModel

from motet.config import EngineConfig
from motet.engines.native.kv.storage import KVLayout, KVStorage
from motet.ids import new_engine_id
from motet.transfer.address import is_loopback
from motet.transfer.base import Transfers
from motet.transfer.layout import KVFacts
from motet.transfer.proof import Proof

logger = logging.getLogger(__name__)

NOT_OF_THE_MODEL = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)
"""Fields of a configuration that may differ between two copies of one model."""
SAMPLES = 64
"""Values of each weight that go into the digest."""


def start_transfers(config: EngineConfig, facts: KVFacts, storage: KVStorage, proof: Proof) -> Transfers:
    """Raises ConfigError if the side channel's address is taken or impossible."""
    # Only here: an engine that keeps its KV to itself loads no NIXL.
    from motet.transfer.nixl import LOOPBACK, NixlTransport
    from motet.transfer.thread import TransferSettings, TransferThread

    if not (is_loopback(config.side_channel_host) or config.cluster_key):
        logger.warning(
            "--cluster-key is not set: whoever reaches %s is believed to be a worker of ours", config.side_channel_host
        )
    memory = storage.memory(proof)
    settings = TransferSettings(
        engine_id=new_engine_id(config.role),
        host=config.side_channel_host,
        port=config.side_channel_port or 0,
        cluster_key=config.cluster_key,
        pull_timeout_s=config.pull_timeout_s,
    )
    ucx = LOOPBACK if is_loopback(config.side_channel_host) else None
    return TransferThread(settings, facts, memory, lambda: NixlTransport(settings.engine_id, memory, ucx=ucx))


def facts_of(model: PreTrainedModel, layout: KVLayout, quantization: str) -> KVFacts:
    return KVFacts(
        model_digest=model_digest(model),
        quantization=quantization,
        dtype=str(layout.dtype).removeprefix("torch."),
        block_size=layout.block_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
    )


@torch.inference_mode()
def model_digest(model: PreTrainedModel) -> str:
    """Names a model by its configuration and some values of each weight: two models of one shape must not read each
    other's KV. Values are taken in bfloat16, so that a model keeps its name in another dtype."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in NOT_OF_THE_MODEL}
    digest = blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=16)
    for name, weight in model.named_parameters():
        flat = weight.detach().flatten()
        values = flat[:: max(1, len(flat) // SAMPLES)][:SAMPLES].to("cpu", torch.bfloat16).view(torch.int16)
        digest.update(f"{name} {tuple(weight.shape)} {values.tolist()}".encode())
    return digest.hexdigest()
