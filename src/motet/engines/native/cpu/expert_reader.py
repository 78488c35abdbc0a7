"""Reads a mixture of experts for the compiled kernels: how its router selects experts, and what its experts compute.

Families differ in the order of softmax, selection and normalization, and few of these choices are fields of a module.
The router therefore selects experts for random numbers, and the selections that the kernels implement are compared with
it. So are the operations between the two products of an expert.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.engines.native import compiled_kernels as c
from motet.engines.native.cpu.norm_reader import StructureError

ROUTERS, SHARED = ("gate", "router"), ("shared_expert", "shared_experts")
"""Names of the router and of the shared expert in the modules of transformers."""
CORRECTION = "e_score_correction_bias"
"""Last part of the name of the tensor that is added to scores to select experts."""
TINY = 1e-20
"""Minimum divisor of the weights in families that do not define one."""
NUM_ROWS = 16
"""Number of rows for which selections are compared. For most pairs of experts, the order of their scores differs
between some of the rows."""


@dataclass(frozen=True)
class Routing:
    """The rule that selects and weights experts. The fields have the names that `Experts` has in `csrc/model.h`."""

    per_row: int
    groups: int
    top_groups: int
    scoring: int
    min_total: float
    scale: float


@dataclass(frozen=True, eq=False)
class ExpertsRead:
    """A mixture of experts."""

    experts: Any
    """The module of all experts, whose weights have three dimensions."""
    router: Any
    routing: Routing
    correction: Tensor | None
    """[experts]"""
    shared: nn.Module | None
    """The shared expert, a feed-forward part as in dense layers."""
    shared_gate: nn.Linear | None
    limit: float
    """Maximum absolute value of gate and up in GPT-OSS; 0 if only the activation combines gate and up."""
    alpha: float

    count: int
    """Number of experts."""
    width: int
    """Number of inputs of an expert's last product."""

    def columns(self, weight: Tensor) -> Tensor:
        """Returns a view [columns, depth] of one expert's weight."""
        return weight.t() if self.experts.is_transposed else weight

    def gate_and_up(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Returns views of the columns of gate and of up, which are the first dimension."""
        if self.experts.is_concatenated:
            return columns[: self.width], columns[self.width :]
        return columns[::2], columns[1::2]


@torch.inference_mode()
def read_experts(module: nn.Module) -> ExpertsRead:
    """Raises StructureError if the kernels do not implement the module."""
    parts: dict[str, Any] = dict(module.named_children())
    experts = parts.pop("experts")
    routers = [parts.pop(name) for name in ROUTERS if name in parts]
    shared = [parts.pop(name) for name in SHARED if name in parts]
    shared_gate = parts.pop("shared_expert_gate", None)
    if len(routers) != 1 or len(shared) > 1 or parts:
        raise StructureError(f"the parts of {type(module).__name__}")
    expected = {"gate_up_proj", "down_proj", *(("gate_up_proj_bias", "down_proj_bias") if _has_bias(experts) else ())}
    if not getattr(experts, "has_gate", False) or {name for name, _ in experts.named_parameters()} != expected:
        raise StructureError(f"the experts {type(experts).__name__}")
    [router], names = routers, {name for name, _ in routers[0].named_parameters()} - {"weight", "bias"}
    state: dict[str, Tensor] = router.state_dict()
    corrections = [name for name in state if name.endswith(CORRECTION)]
    if names - {*corrections} or len(corrections) > 1:
        raise StructureError(f"the router {type(router).__name__}")
    correction = state[corrections[0]].flatten().float() if corrections else None
    read = ExpertsRead(
        experts,
        router,
        _routing(router, correction),
        correction,
        shared[0] if shared else None,
        shared_gate,
        limit=float(getattr(experts, "limit", 0.0)),
        alpha=float(getattr(experts, "alpha", 0.0)),
        count=len(experts.down_proj),
        width=experts.down_proj.shape[1 if experts.is_transposed else 2],
    )
    _check_gate(read)
    return read


def _has_bias(experts: Any) -> bool:
    return bool(getattr(experts, "has_bias", False))


def _routing(router: Any, correction: Tensor | None) -> Routing:
    """Returns the routing that gives the same weights as the router."""
    router = copy.deepcopy(router).float()  # in bfloat16, many experts would be equally good
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(NUM_ROWS, router.weight.shape[1], generator=generator)
    logits, weights = _run(router, rows)
    if torch.allclose(logits, F.linear(rows, router.weight, getattr(router, "bias", None)), rtol=1e-3, atol=1e-4):
        for routing in _candidates(router, weights):
            if torch.allclose(weights, select(routing, logits, correction=correction), rtol=1e-3, atol=1e-6):
                return routing
    raise StructureError(f"the router {type(router).__name__}")


def _run(router: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logits of a router, and the weight of each expert, 0 if it is not selected: both [rows, experts]."""
    try:
        outputs = router(rows)
        [selected] = [output for output in outputs if not output.is_floating_point()]
        logits, weights = sorted((output for output in outputs if output.is_floating_point()), key=_width, reverse=True)
        return logits.float(), torch.zeros_like(logits).float().scatter(1, selected, weights.float())
    except (TypeError, ValueError, RuntimeError) as error:
        raise StructureError(f"the router {type(router).__name__}") from error


def _width(tensor: Tensor) -> int:
    return tensor.shape[-1]


def _candidates(router: Any, weights: Tensor) -> Iterator[Routing]:
    given = getattr(router, "routed_scaling_factor", None)
    minimum = getattr(router, "norm_min", None)
    for scoring, normalized in product((c.SOFTMAX_OF_LOGITS, c.SIGMOID_OF_LOGITS), (True, False)):
        yield Routing(
            per_row=int(weights.count_nonzero(1).max()),
            groups=int(getattr(router, "num_group", None) or 1),
            top_groups=int(getattr(router, "topk_group", None) or 1),
            scoring=scoring,
            min_total=float(minimum or TINY) if normalized else 0.0,
            scale=1.0 if given is None else float(given),
        )


def select(routing: Routing, logits: Tensor, *, correction: Tensor | None) -> Tensor:
    """Returns the weight of each expert, as the kernels compute it (`csrc/experts.cpp`): [rows, experts]."""
    scores = logits.softmax(-1) if routing.scoring == c.SOFTMAX_OF_LOGITS else logits.sigmoid()
    ranks = scores if correction is None else scores + correction
    if routing.top_groups < routing.groups:
        by_group = ranks.view(len(ranks), routing.groups, -1)
        best = by_group.topk(2)[0].sum(-1).topk(routing.top_groups)[1]
        kept = torch.zeros(len(ranks), routing.groups, dtype=torch.bool).scatter(1, best, value=True)
        ranks = by_group.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    selected = ranks.topk(routing.per_row)[1]
    weights = scores.gather(1, selected)
    if routing.min_total:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(routing.min_total)
    return torch.zeros_like(scores).scatter(1, selected, weights * routing.scale)


def _check_gate(read: ExpertsRead) -> None:
    """Raises StructureError if gate and up of an expert are combined in another way than in the kernels."""
    both = 4 * torch.randn(4, 2 * read.width, generator=torch.Generator().manual_seed(0))
    found = read.experts._apply_gate(both)  # noqa: SLF001  the interface of experts in transformers
    gate, up = (part.t() for part in read.gate_and_up(both.t()))
    if read.limit:
        gate, up = gate.clamp(max=read.limit), up.clamp(-read.limit, read.limit)
        expected = (up + 1) * gate * torch.sigmoid(gate * read.alpha)
    else:
        expected = read.experts.act_fn(gate) * up
    if not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
        raise StructureError(f"the experts {type(read.experts).__name__}")
