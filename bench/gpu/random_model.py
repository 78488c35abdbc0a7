"""Makes a model with random weights on the device, and an engine core over it, without files and network."""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from motet.engine_info import EngineInfo
from motet.engines.native.build import choose_backend
from motet.engines.native.core import CoreOptions, EngineCore
from motet.engines.native.cuda.cuda_runner import cuda_backend
from motet.engines.native.kv.cache_size import num_blocks_for
from motet.engines.native.kv.storage import KVLayout, KVStorage
from motet.engines.native.step.inputs import StepInputs
from motet.engines.native.step.run import ATTENTION_NAME, Backend, ModelRunner
from motet.ids import ModelName
from motet.settings.engine_config import EngineConfig
from motet.types import Role

BLOCK_SIZE = 16


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @property
    def block_weights(self) -> int:
        """Returns the number of weights of all layers and the head. A token reads only one row of the embedding."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocab

    @property
    def kv_values(self) -> int:
        """Returns the number of K and V values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def operations(self, tokens: int, keys_seen: int) -> int:
        """Returns the multiplications and additions of a pass over `tokens` that attend to `keys_seen` keys."""
        return 2 * tokens * self.block_weights + 4 * keys_seen * self.layers * self.heads * self.head_dim


SHAPES = {
    "llama-3-8b": LlamaShape(32, 4096, 32, 8, 128, 14336, 128_256),
    "tiny": LlamaShape(2, 64, 4, 2, 16, 128, 320),
}


@dataclass(frozen=True)
class ModelLimits:
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_gb: float


class TimedRunner:
    """A runner that measures the time of each pass on the device."""

    trunk_tokens_saved = 0

    def __init__(self, runner: ModelRunner) -> None:
        self.device = runner.device
        self.verify, self.copy_slots, self.settle = runner.verify, runner.copy_slots, runner.settle
        self._runner = runner
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def run(self, inputs: StepInputs) -> torch.Tensor:
        if self.device.type != "cuda":
            return self._runner.run(inputs)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        logits = self._runner.run(inputs)
        after.record()
        self._marks.append((before, after))
        return logits

    def take_ms(self) -> list[float]:
        """Returns the times of the passes since the last call. Returns no times on the CPU."""
        marks, self._marks = self._marks, []
        return [float(before.elapsed_time(after)) for before, after in marks]


def random_model(shape: LlamaShape, dtype: torch.dtype, device: torch.device, *, max_model_len: int) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max_model_len,
        tie_word_embeddings=False,
    )
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    torch.nn.Module.eval(model)
    return model


def core_over(
    model: PreTrainedModel, shape: LlamaShape, limits: ModelLimits, *, share_trunks: bool, enforce_eager: bool
) -> tuple[EngineCore, TimedRunner]:
    """Returns the engine's own core over the model, without a prefix cache, so that every prompt is computed."""
    device, dtype = model.device, model.dtype
    layout = KVLayout(shape.layers, BLOCK_SIZE, shape.kv_heads, shape.head_dim, dtype)
    num_blocks = num_blocks_for(
        limits.kv_cache_gb, layout.bytes_per_block, max_model_len=limits.max_model_len, block_size=BLOCK_SIZE
    )
    storage = KVStorage(layout, num_blocks, device=device)
    config = EngineConfig(
        model_path="", model_name="bench", max_num_seqs=limits.max_num_seqs, enforce_eager=enforce_eager
    )
    backend: Backend
    if device.type == "cuda":
        backend = cuda_backend(
            model, storage, config=config, max_model_len=limits.max_model_len, share_trunks=share_trunks
        )
    else:
        backend = choose_backend(model, storage, kernels="torch", max_model_len=limits.max_model_len)
    info = EngineInfo(
        model=ModelName("bench"),
        max_model_len=limits.max_model_len,
        vocab_size=shape.vocab,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        bytes_per_block=layout.bytes_per_block,
        max_num_seqs=limits.max_num_seqs,
        role=Role.BOTH,
        eos_token_ids=(),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        fingerprint="",
    )
    timed = TimedRunner(backend.runner)
    options = CoreOptions(
        max_num_batched_tokens=limits.max_num_batched_tokens, prefix_cache=False, cache_answers=False, lease_s=60.0
    )
    return EngineCore(info, timed, options=options), timed
