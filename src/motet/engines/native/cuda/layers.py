"""The layers of a Hugging Face decoder in as few launches as stay simple: merged products, and one kernel for what
stands between them.

    attention   one product for queries, keys and values; norm, turn and store in one launch; the step's attention; the
                output's product
    MLP         one product for gate and up; the activation and what it gates in one launch; the product back
    norms       one launch each

The decoder stays Hugging Face's: its order of layers, embeddings, angles, residuals, head. Values between two products
are rounded once, not after every operation of a chain, so that they are nearer to float32 than the chain's.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from motet.engines.native.attention.group import Scores
from motet.engines.native.cpu.asked import scores_asked
from motet.engines.native.cuda.step import Activation, Norms, Operators, Step, Turns


def fuse(model: PreTrainedModel, operators: Operators) -> None:
    """Puts our layers in the place of the model's. An MLP with another activation than we know stays as it is."""
    scores = scores_asked(model)
    centre = 1.0 if "Gemma" in type(model).__name__ else 0.0  # Gemma's norms multiply with 1 + weight
    epsilon = model.config.rms_norm_eps
    activation = getattr(model.config, "hidden_activation", None) or model.config.hidden_act
    for index, (layer, asked) in enumerate(zip(model.model.layers, scores, strict=True)):
        norms = _norms(layer.self_attn, centre, epsilon)
        layer.self_attn = Attention(layer.self_attn, index, asked, norms, operators)
        if activation in {known.value for known in Activation}:
            layer.mlp = GatedMLP(layer.mlp, Activation(activation), operators)
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            model.set_submodule(name, Norm(centred(module, centre), epsilon, operators))


class Linear(nn.Module):
    """Several products of one input as one; the weights are in memory once, here."""

    def __init__(self, *parts: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([part.weight.detach() for part in parts]), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if parts[0].bias is not None:
            self.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Attention(nn.Module):
    """In the place of a decoder layer's `self_attn`; `step` is what the runner gives to the model's forward."""

    def __init__(self, old: nn.Module, layer: int, scores: Scores, norms: Norms | None, operators: Operators) -> None:
        super().__init__()
        self.qkv = Linear(*(_linear(old, name) for name in ("q_proj", "k_proj", "v_proj")))
        self.out = _linear(old, "o_proj")
        self._layer = layer
        self._scores = scores
        self._norms = norms
        self._operators = operators

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, rows, hidden]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # both [1, rows, head_dim]
        step: Step,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        turns = Turns(position_embeddings[0][0], position_embeddings[1][0])
        query = self._operators.turn(self._layer, self.qkv(hidden_states[0]), turns, self._norms, step)
        output = self._operators.attend(self._layer, query, step, self._scores)
        return self.out(output.flatten(1)).unsqueeze(0), None


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, old: nn.Module, activation: Activation, operators: Operators) -> None:
        super().__init__()
        self.gate_up = Linear(_linear(old, "gate_proj"), _linear(old, "up_proj"))
        self.down = _linear(old, "down_proj")
        self._activation = activation
        self._operators = operators

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, rows, hidden] of the same."""
        gated: torch.Tensor = self._operators.gate(self.gate_up(x[0]), self._activation)
        down: torch.Tensor = self.down(gated)
        return down.unsqueeze(0)


class Norm(nn.Module):
    def __init__(self, weight: torch.Tensor, epsilon: float, operators: Operators) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._epsilon = epsilon
        self._operators = operators

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._operators.norm(x.contiguous(), self.weight, self._epsilon)


def centred(norm: nn.Module, centre: float) -> torch.Tensor:
    """What a norm multiplies with, float32."""
    weight = norm.weight
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"{type(norm).__name__} has no weight")
    return weight.detach().float() + centre


def _norms(attention: nn.Module, centre: float, epsilon: float) -> Norms | None:
    """Of Qwen 3 and Gemma 3."""
    parts = dict(attention.named_children())
    if "q_norm" not in parts:
        return None
    return Norms(centred(parts["q_norm"], centre), centred(parts["k_norm"], centre), epsilon)


def _linear(module: nn.Module, name: str) -> nn.Linear:
    found = module.get_submodule(name)
    if not isinstance(found, nn.Linear):
        raise TypeError(f"{type(module).__name__}.{name} is a {type(found).__name__}")
    return found
