"""Runs the model on one step's flat batch. The only place where plan numbers become tensors."""

from typing import Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel

from motet.engines.native.attention.group import Scores, StepAttention
from motet.engines.native.inputs import SickRowsError, StepInputs
from motet.engines.native.kv.storage import KVStorage

ATTENTION_NAME = "motet"


class LayerAttention(Protocol):
    """One step's attention, called by every layer in turn."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """Stores key and value [1, kv_heads, rows, head_dim]; output [1, rows, heads, head_dim] of the query
        [1, heads, rows, head_dim]."""
        ...


def attend(  # sizes: the signature is transformers'
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    step: LayerAttention,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface; `step` is the keyword the runner gives to the model's forward. Masks are ours:
    a name without a mask function gets `attention_mask=None` (transformers' documentation of `AttentionInterface`)."""
    layer = module.layer_idx
    if not isinstance(layer, int):
        raise TypeError(f"{type(module).__name__} has no layer index")
    output = step.attend(layer, query, key, value, Scores(scaling, sliding_window, softcap))
    return output, None


AttentionInterface.register(ATTENTION_NAME, attend)


class Runner:
    """A model and the KV memory it reads and writes."""

    def __init__(self, model: PreTrainedModel, storage: KVStorage) -> None:
        self._model = model
        self.storage = storage
        self.device = storage.keys.device
        self._sick = torch.zeros(0, dtype=torch.bool)

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Logits [rows wanted, vocab_size] in the model's dtype; rows as in `inputs.logit_rows`, padding included."""
        step = StepAttention(inputs.attention, self._ints(inputs.slots), self.storage)
        output = self._model(
            input_ids=self._ints(inputs.token_ids).unsqueeze(0),
            position_ids=self._ints(inputs.positions).unsqueeze(0),
            use_cache=False,
            logits_to_keep=self._ints(inputs.logit_rows),
            step=step,
        )
        self._sick = step.sick
        logits = output.logits[0]
        if not isinstance(logits, torch.Tensor):
            raise TypeError(f"the model returned {type(logits).__name__} for logits")
        return logits

    def verify(self) -> None:
        """SickRowsError if a row of the last run came to nothing."""
        if sick := self._sick.nonzero().flatten().tolist():
            raise SickRowsError(sick)

    def copy_slots(self, source: list[int], target: list[int]) -> None:
        """Copies KV from slots to slots, in all layers."""
        self.storage.copy(self._ints(source), self._ints(target))

    def settle(self) -> None:
        """A GPU runs behind what it is told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _ints(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)
