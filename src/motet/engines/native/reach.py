"""Makes an engine's KV memory reachable for other workers: the transfer thread, and what describes the memory."""

import logging
from hashlib import blake2b
from ipaddress import ip_address

import torch

from motet.config import EngineConfig
from motet.engines.native.kv.storage import KVLayout, KVStorage
from motet.ids import new_engine_id
from motet.transfer.base import Transfers
from motet.transfer.layout import KVFacts
from motet.transfer.proof import Proof

logger = logging.getLogger(__name__)

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


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def facts_of(model: torch.nn.Module, layout: KVLayout) -> KVFacts:
    return KVFacts(
        model_digest=weights_digest(model),
        dtype=str(layout.dtype).removeprefix("torch."),
        block_size=layout.block_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
    )


@torch.inference_mode()
def weights_digest(model: torch.nn.Module) -> str:
    """Names a model by some values of each weight: two models of one shape must not read each other's KV. In bfloat16:
    a model keeps its name in another dtype."""
    digest = blake2b(digest_size=16)
    for name, weight in model.named_parameters():
        flat = weight.detach().flatten()
        values = flat[:: max(1, len(flat) // SAMPLES)][:SAMPLES].to("cpu", torch.bfloat16).view(torch.int16)
        digest.update(f"{name} {tuple(weight.shape)} {values.tolist()}".encode())
    return digest.hexdigest()
