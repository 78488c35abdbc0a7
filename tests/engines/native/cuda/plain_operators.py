"""The operations of the kernels in plain torch, over the same items and tables, one at a time, in float32.

With these operators, everything except the kernels (cutting, layout, padding and replay of steps) is tested without a
GPU. The kernels themselves are compared with these operators.
"""

import torch
import torch.nn.functional as F

from motet.engines.native.attention.group_attention import Scores
from motet.engines.native.cuda.launch import Activation, CosSin, CudaStep, Norms, Operators


class PlainOperators(Operators):
    def __init__(self) -> None:
        """Does not load Triton's kernels."""

    def rotate(
        self, layer: int, projected: torch.Tensor, *, cos_sin: CosSin, norms: Norms | None, step: CudaStep
    ) -> torch.Tensor:
        heads, (_, kv_heads, head_dim) = step.geometry.num_heads, step.storage.keys[layer].shape
        split = projected.view(len(projected), -1, head_dim)  # heads, kv heads, kv heads
        query, key = split[:, :heads].float(), split[:, heads : heads + kv_heads].float()
        value = split[:, heads + kv_heads :]
        if norms is not None:
            query = self.norm(query, norms.query, epsilon=norms.epsilon)
            key = self.norm(key, norms.key, epsilon=norms.epsilon)
        query, key = _rotated(query, cos_sin), _rotated(key, cos_sin).to(projected.dtype)
        slots = step.ints.slots.long()
        real = (slots >= 0).nonzero().flatten()
        step.storage.write(layer, slots[real], key[real], value[real])
        if layer == step.storage.num_layers - 1:
            non_finite = ~value[real].isfinite().flatten(1).all(1)
            step.scratch.non_finite[real[non_finite]] = 1
        return query.to(projected.dtype)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, *, epsilon: float) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * weight).to(x.dtype)

    def gate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = x.float().chunk(2, dim=1)
        activated = F.silu(gate) if activation is Activation.SILU else F.gelu(gate, approximate="tanh")
        return (activated * up).to(x.dtype)

    def attend(self, layer: int, query: torch.Tensor, *, step: CudaStep, scores: Scores) -> torch.Tensor:
        ints, scratch = step.ints, step.scratch
        output = torch.full(query.shape, torch.nan, dtype=query.dtype, device=query.device)
        first = ints.first_part.long()
        scratch.parts.fill_(torch.nan)
        for item in [*ints.narrow.tolist(), *ints.wide.tolist()]:
            first_row, num_rows, part = item[0], item[1], item[6]
            if num_rows:
                where = first[first_row : first_row + num_rows] + part
                rows = query[first_row : first_row + num_rows]
                scratch.parts[where], scratch.lse[where] = _attend_item(layer, rows, item, step, scores)
        for row, (begin, end) in enumerate(zip(first.tolist(), first[1:].tolist(), strict=False)):
            weight = torch.softmax(scratch.lse[begin:end] * torch.log(torch.tensor(2.0)), dim=0).nan_to_num()
            output[row] = (scratch.parts[begin:end] * weight.unsqueeze(-1)).sum(0).to(query.dtype)
        for item in ints.final.tolist():
            rows = query[item[0] : item[0] + item[1]]
            output[item[0] : item[0] + item[1]] = _attend_item(layer, rows, item, step, scores)[0].to(query.dtype)
        return output


def _rotated(x: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
    """Applies RoPE to x [rows, heads, head_dim] float32; the halves of a head are paired."""
    one, other = x.chunk(2, dim=-1)
    cosines, sines = (angles.float().unsqueeze(1) for angles in cos_sin)
    return x * cosines + torch.cat([-other, one], dim=-1) * sines


def _attend_item(
    layer: int, rows: torch.Tensor, item: list[int], step: CudaStep, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output [rows, heads, head_dim] float32 and log-sum-exp [rows, heads], base 2, of one item."""
    first_row, num_rows, first_position, table, begin, end, *_ = item
    size, device = step.storage.block_size, rows.device
    places = torch.arange(begin, end, device=device)
    slots = step.ints.tables.long()[table + places // size] * size + places % size
    heads_per_kv_head = step.geometry.heads_per_kv_head
    keys = step.storage.keys[layer][slots].float().repeat_interleave(heads_per_kv_head, dim=1)
    values = step.storage.values[layer][slots].float().repeat_interleave(heads_per_kv_head, dim=1)
    scaled = torch.einsum("rhd,khd->rhk", rows.float(), keys) * scores.scale
    if scores.softcap is not None:
        scaled = scores.softcap * torch.tanh(scaled / scores.softcap)
    own = (step.ints.positions[first_row : first_row + num_rows] - first_position)[:, None]
    visible = places[None, :] <= own
    if scores.window is not None:
        visible &= places[None, :] > own - scores.window
    scaled = scaled.masked_fill(~visible[:, None, :], -torch.inf)
    lse = torch.logsumexp(scaled, dim=-1)
    weights = torch.exp(scaled - lse.unsqueeze(-1)).nan_to_num()
    return torch.einsum("rhk,khd->rhd", weights, values), lse / torch.log(torch.tensor(2.0))
