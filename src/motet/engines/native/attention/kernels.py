"""Attention operators that also return the log-sum-exp, which is what makes two partial results mergeable.

    query       [batch, heads, rows, head_dim]
    key, value  [batch, heads, keys, head_dim]
    mask        [batch or 1, 1, rows, keys] additive, of the query's dtype, or None
    returns     output [batch, heads, rows, head_dim] in the query's dtype, log-sum-exp [batch, heads, rows] float32

A row whose keys are all masked comes back with output 0 and log-sum-exp minus infinity.
"""

from typing import Protocol

import torch
import torch.nn.functional as F

_FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001  the only way to its log-sum-exp


class Kernel(Protocol):
    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        mask: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def flash_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's flash attention for the CPU. Query rows are padded to a multiple of 4: with fewer it takes other loops,
    which give other bits."""
    rows = query.shape[2]
    missing = -rows % 4
    if missing:
        query = F.pad(query, (0, 0, 0, missing))
        if mask is not None:
            mask = F.pad(mask, (0, 0, 0, missing))
    output, lse = _FLASH_CPU(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
    if missing:
        output, lse = output[:, :, :rows], lse[:, :, :rows]
        mask = None if mask is None else mask[:, :, :rows]
    if mask is not None:
        blind = torch.isneginf(mask).all(-1)  # [batch or 1, 1, rows]; the operator says log-sum-exp 0 for these
        lse = lse.masked_fill(blind, float("-inf"))
    return output, lse


def plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in float32, on any device; knows softcap: scores = cap * tanh(scores / cap) (Gemma 2).

    Rows are padded to a multiple of 4 and keys to one of 64, for equal bits in every company (see `flash_cpu`).
    """
    rows, keys = query.shape[2], key.shape[2]
    q = F.pad(query, (0, 0, 0, -rows % 4)).float()
    k, v = (F.pad(x, (0, 0, 0, -keys % 64)).float() for x in (key, value))
    scores = torch.matmul(q, k.transpose(2, 3)) * scale  # [batch, heads, rows, keys], both padded
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores[:, :, :rows, :keys] += mask
    scores[..., keys:] = float("-inf")
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num()  # a row of minus infinities: 0, not NaN
    return torch.matmul(weights, v)[:, :, :rows].to(query.dtype), lse[:, :, :rows]


class SoftcapKernel:
    """`plain` with a fixed softcap."""

    def __init__(self, softcap: float) -> None:
        self.softcap = softcap

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        mask: torch.Tensor | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return plain(query, key, value, mask=mask, scale=scale, softcap=self.softcap)


def kernel_for(device: torch.device, softcap: float | None) -> Kernel:
    """The best operator here for a device and a model."""
    if softcap is not None:
        return SoftcapKernel(softcap)
    return flash_cpu if device.type == "cpu" else plain
