"""Batch-invariant experts with torch's operators: the bits of a row do not depend on the other rows of a step.

Each expert computes the rows that its router assigns to it. Their number depends on all rows of the step, and a matrix
product has other bits for other numbers of rows unless they are multiples of `ROW_MULTIPLE` (`step.inputs`). The rows
of each expert are therefore padded, and the results of a row are added in the order of its own experts.
"""

from collections.abc import Callable
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from motet.engines.native.step.inputs import ROW_MULTIPLE

EXPERTS_NAME = "motet"
"""Name of `compute_experts` in transformers' interface for experts."""


def compute_experts(module: nn.Module, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Implements the experts interface of transformers. `rows`: [rows, hidden]; `experts` and `weights`: the experts of
    each row, and the factors of their results, [rows, experts of a row]. Returns [rows, hidden]."""
    num_rows, per_row = experts.shape
    by_expert = experts.flatten().argsort(stable=True)  # [rows * experts of a row]: indices of row and place
    ends = experts.flatten().bincount().cumsum(0).tolist()
    results = rows.new_empty(num_rows * per_row, rows.shape[1])
    for expert, (begin, end) in enumerate(pairwise((0, *ends))):
        if begin < end:
            chosen = by_expert[begin:end]
            padded = F.pad(rows[chosen // per_row], (0, 0, 0, (begin - end) % ROW_MULTIPLE))
            results[chosen] = _compute_expert(module, padded, expert=expert)[: end - begin]
    weighted = results.view(num_rows, per_row, -1).float() * weights.unsqueeze(-1)
    total = weighted[:, 0]
    for number in range(1, per_row):  # the order of the terms in `sum` can depend on the shape
        total = total + weighted[:, number]
    return total.to(rows.dtype)


def _compute_expert(module: nn.Module, rows: Tensor, *, expert: int) -> Tensor:
    def product(inputs: Tensor, name: str) -> Tensor:
        weight: Tensor = getattr(module, f"{name}_proj")[expert]
        bias = getattr(module, f"{name}_proj_bias")[expert] if module.has_bias else None
        return F.linear(inputs, weight.t() if module.is_transposed else weight, bias)

    if module.has_gate:
        gate: Callable[[Tensor], Tensor] = module._apply_gate  # type: ignore[assignment]  # noqa: SLF001  interface of experts
        return product(gate(product(rows, "gate_up")), "down")
    activate: Callable[[Tensor], Tensor] = module.act_fn  # type: ignore[assignment]
    return product(activate(product(rows, "up")), "down")


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, compute_experts)
