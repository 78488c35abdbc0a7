"""What every layer asks of attention: scale, window and cap on its scores, found out by running the model on one token.

Families keep them in different places (a module's attribute, the config, a table by layer), but all tell the attention
function.
"""

import torch
from transformers import PreTrainedModel

from motet.engines.native.attention.group import Scores


@torch.inference_mode()
def scores_asked(model: PreTrainedModel) -> list[Scores]:
    """One entry a layer."""
    probe = _Probe()
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    model(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=1, step=probe)
    return [probe.asked[layer] for layer in range(len(probe.asked))]


class _Probe:
    """Stands where a step's attention would, and answers with the query."""

    def __init__(self) -> None:
        self.asked: dict[int, Scores] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        self.asked[layer] = scores
        return query.transpose(1, 2)
