"""A trainer of a policy in this process: `transformers` in float32, as most trainers hold their weights.

It says what log-probability a drawn token should have had, it generates by itself, and it takes a step.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

STEP_OF_ADAM = 1e-5
"""What a step of Adam adds to a weight at the usual learning rate, whatever its gradient is."""
STEPS_OF_A_NUDGE = 100


@dataclass(frozen=True)
class Drawn:
    """One answer, and the log-probabilities that its server told."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True)
class Mismatch:
    """How far the log-probabilities of drawn tokens are from the trainer's, in nats."""

    mean: float
    p99: float
    tokens: int


class Policy:
    """The weights that are trained, in float32."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._dice = torch.Generator().manual_seed(0)

    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor.detach()) for name, tensor in self.model.named_parameters()]

    def nudge(self) -> None:
        """Changes every weight by as much as a hundred steps in random directions would."""
        size = STEP_OF_ADAM * math.sqrt(STEPS_OF_A_NUDGE)
        for _, tensor in self.named_tensors():
            tensor += size * torch.randn(tensor.shape, generator=self._dice)

    def mismatch(self, answers: Sequence[Drawn], *, rounded: bool) -> Mismatch:
        """Compares the told log-probabilities with the trainer's: `rounded` to bf16 weights, or in all their digits.

        The trainer computes in float32 either way.
        """
        kept = {name: tensor.clone() for name, tensor in self.named_tensors()} if rounded else {}
        for name, tensor in self.named_tensors():
            if name in kept:
                tensor.copy_(tensor.bfloat16())
        with torch.inference_mode():
            true = self._logprobs(answers)
        for name, tensor in self.named_tensors():
            if name in kept:
                tensor.copy_(kept[name])
        told = torch.tensor([answer.logprobs for answer in answers])
        away = (told - true).abs().flatten()
        return Mismatch(away.mean().item(), away.quantile(0.99).item(), len(away))

    def _logprobs(self, answers: Sequence[Drawn]) -> torch.Tensor:
        """Returns the log-probability of each token of answers with equal lengths, [answers, tokens] float32."""
        tokens = torch.tensor([[*answer.prompt, *answer.tokens] for answer in answers])
        drawn = torch.tensor([answer.tokens for answer in answers])
        logits = self.model(tokens, use_cache=False, logits_to_keep=drawn.shape[1] + 1).logits[:, :-1]
        return torch.gather(logits.log_softmax(-1), -1, drawn[..., None])[..., 0]

    def generate_s(self, prompts: Sequence[Sequence[int]], n: int, max_tokens: int) -> float:
        """Returns the seconds in which `model.generate` writes n answers to each prompt, all in one batch."""
        begin = time.perf_counter()
        written = self.model.generate(  # type: ignore[operator]
            torch.tensor(prompts), attention_mask=torch.ones(len(prompts), len(prompts[0])), do_sample=True, top_k=0,
            top_p=1.0, num_return_sequences=n, min_new_tokens=max_tokens, max_new_tokens=max_tokens, pad_token_id=0,
        )  # fmt: skip
        assert written.shape == (len(prompts) * n, len(prompts[0]) + max_tokens)
        return time.perf_counter() - begin

    def step_s(self, group: Sequence[Drawn]) -> float:
        """Returns the seconds of a forward and a backward pass over these answers; no weight changes."""
        advantages = torch.linspace(-1, 1, len(group))[:, None]
        begin = time.perf_counter()
        logprobs = self._logprobs(group)
        loss = -(advantages * (logprobs - logprobs.detach()).exp()).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        taken = time.perf_counter() - begin
        self.model.zero_grad(set_to_none=True)
        return taken
