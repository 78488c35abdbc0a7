"""Chooses what runs the model: the kernels of `csrc/` where they can, torch's operators elsewhere."""

import logging
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from motet.engines.native.core import ModelRunner
from motet.engines.native.cpu.agree import chunks_agree
from motet.engines.native.cpu.library import digest, library
from motet.engines.native.cpu.runner import CpuRunner
from motet.engines.native.cpu.weights import PackedModel, obstacle
from motet.engines.native.fingerprint import fingerprint, operators_agree
from motet.engines.native.kv.storage import KVStorage
from motet.engines.native.runner import Runner
from motet.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    runner: ModelRunner
    fingerprint: str


def choose_backend(
    model: PreTrainedModel, storage: KVStorage, *, kernels: str, max_model_len: int, quantization: str = "none"
) -> Backend:
    """`kernels` is `auto`, `compiled` or `torch`, `quantization` `none` or `int8`; ConfigError where the kernels cannot
    run what they are asked to. Takes the weights out of the model if they can."""
    dtype, device = storage.keys.dtype, storage.keys.device
    found = library()
    reason = obstacle(found, model, dtype, device)
    if kernels == "compiled" and reason is not None:
        raise ConfigError(f"--kernels compiled: {reason}; use auto or torch")
    int8 = quantization == "int8"
    if int8 and (reason is not None or kernels == "torch"):
        raise ConfigError(f"--quantization int8 needs the compiled kernels: {reason or '--kernels torch was given'}")
    if kernels == "torch" or reason is not None or found is None:
        if kernels == "auto" and device.type == "cpu":
            logger.info("torch's operators run the model, not the compiled kernels: %s", reason)
        same = operators_agree(model, head_dim=storage.keys.shape[-1], dtype=dtype, device=device)
        return Backend(Runner(model, storage), fingerprint(f"torch-{torch.__version__}", same, dtype, device))
    packed = PackedModel(model, storage, max_positions=max_model_len, kernels=found, int8=int8)
    runner = CpuRunner(packed, storage, num_threads=torch.get_num_threads(), kernels=found)
    same = chunks_agree(runner, packed.vocab_size, storage)
    return Backend(runner, fingerprint(f"kernels-{digest()}{'-int8' if int8 else ''}", same, dtype, device))
