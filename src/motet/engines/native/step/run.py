"""The forward pass of a step: the interface of runners, and the runner that uses torch's operators.

The runner of the compiled kernels is in `cpu.cpu_runner`, the runner for GPUs in `cuda.cuda_runner`. `build` chooses
one of the three.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from motet.engines.native.adapters.linear_adapters import LinearAdapters
from motet.engines.native.adapters.low_rank import AdapterMaker
from motet.engines.native.attention.group_attention import Scores, StepAttention
from motet.engines.native.kv.storage import KVStorage
from motet.engines.native.model_weights import ModelWeights
from motet.engines.native.step.inputs import NonFiniteRowsError, StepInputs
from motet.errors import UnsupportedModelError

ATTENTION_NAME = "motet"

WITHOUT_EFFECT = frozenset({"dropout", "position_ids", "use_cache", "output_router_logits"})
"""Arguments of attention that change no logits: dropout is for training, and the step plan has the positions."""

LayerAttention = Callable[[int, Tensor, Tensor, Tensor, Scores], Tensor]
"""The attention function of one step, which every layer calls with: layer, query [1, heads, rows, head_dim], key and
value [1, kv_heads, rows, head_dim], and scores. It stores key and value, and returns [1, rows, heads, head_dim]."""


class ModelRunner(Protocol):
    """Runs the forward pass of steps."""

    @property
    def device(self) -> torch.device: ...

    @property
    def trunk_tokens_saved(self) -> int:
        """Number of trunk positions that the last run did not read, because several groups shared one read."""
        ...

    def run(self, inputs: StepInputs) -> Tensor:
        """Returns logits [len(inputs.logit_rows), vocab_size], valid until the next run. The rows of padding can be
        missing, and a GPU can still be computing the other rows."""
        ...

    def verify(self) -> None:
        """Raises NonFiniteRowsError for rows of the last run that are not finite. Called after the tokens of that run
        have been sampled: a GPU has finished by then, so this does not wait."""
        ...

    def copy_slots(self, source: list[int], target: list[int]) -> None:
        """Copies KV from slots to slots, in all layers."""
        ...

    def settle(self) -> None:
        """Waits until all runs have ended: their results are in memory, and nothing reads or writes it any more."""
        ...


@dataclass(frozen=True)
class Backend:
    """A runner, its weights, and its part of the fingerprint."""

    runner: ModelRunner
    operators: str
    """Name of the library or the kernels that compute, with version or digest."""
    same: bool
    """True if a check on this machine has shown that results are batch-invariant."""
    weights: ModelWeights
    kernels: str
    """`avx512` or `avx2` for the compiled kernels, `torch`, or `cuda`."""
    adapters: AdapterMaker | None = None
    """Converts adapters for the runner; None if the runner cannot compute adapters."""
    note: str = ""
    """Reason why the compiled kernels do not run, with the remedy; empty if they run or were not requested."""


_STEP: ContextVar[LayerAttention | None] = ContextVar("step", default=None)


@contextmanager
def step_attention(attention: LayerAttention) -> Iterator[None]:
    """Sets the attention function that `attend` calls. It is not an argument of the model's forward pass, because some
    families do not pass unknown arguments on to attention."""
    token = _STEP.set(attention)
    try:
        yield
    finally:
        _STEP.reset(token)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Implements the attention interface of transformers. `attention_mask` is None for an attention without a mask
    function (documentation of `AttentionInterface`): the function of `step_attention` knows which keys each row reads.
    `s_aux`: attention sinks, one per head.

    Raises UnsupportedModelError for any other argument, which could change the result."""
    if unknown := sorted(name for name, given in others.items() if name not in WITHOUT_EFFECT and given is not None):
        raise UnsupportedModelError(f"the attention of this model has {', '.join(unknown)}, which is not implemented")
    step = _STEP.get()
    if step is None:
        raise RuntimeError("attention was called outside of `step_attention`")
    layer = module.layer_idx
    if not isinstance(layer, int):
        raise TypeError(f"{type(module).__name__} has no layer index")
    scores, width = Scores(scaling, sliding_window, softcap, s_aux), value.shape[-1]
    # The values of latent attention (DeepSeek) are narrower than the keys. The KV cache stores them padded with zeros.
    value = F.pad(value, (0, key.shape[-1] - width)) if width < key.shape[-1] else value
    return step(layer, query, key, value, scores)[..., :width], None


AttentionInterface.register(ATTENTION_NAME, attend)


class TorchRunner:
    """Runs a model with torch's operators, on any device."""

    def __init__(self, model: PreTrainedModel, storage: KVStorage) -> None:
        self._model = model
        self.storage = storage
        self.device = storage.keys.device
        self.copy_slots = storage.copy
        self.trunk_tokens_saved = 0
        self.adapters = LinearAdapters(model)
        self._non_finite = torch.zeros(0, dtype=torch.bool)

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> Tensor:
        """Returns logits [len(inputs.logit_rows), vocab_size] in the model's dtype, with the rows of padding."""
        attention = StepAttention(inputs.attention, self._ints(inputs.slots), storage=self.storage)
        with step_attention(attention.attend), self.adapters.step(inputs.adapters, num_rows=len(inputs.token_ids)):
            output = self._model(
                input_ids=self._ints(inputs.token_ids).unsqueeze(0),
                position_ids=self._ints(inputs.positions).unsqueeze(0),
                use_cache=False,
                logits_to_keep=self._ints(inputs.logit_rows),
            )
        self._non_finite = attention.non_finite
        self.trunk_tokens_saved = attention.trunk_tokens_saved
        logits = output.logits[0]
        if not isinstance(logits, Tensor):
            raise TypeError(f"the model returned {type(logits).__name__} for logits")
        return logits

    def verify(self) -> None:
        if rows := self._non_finite.nonzero().flatten().tolist():
            raise NonFiniteRowsError(rows)

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _ints(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)
