"""A trainer of a policy in this process: `transformers` in float32, the dtype in which most trainers hold weights.

It computes the log-probabilities of sampled tokens, generates answers, and takes a training step.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

STEP_OF_ADAM = 1e-5
"""Change of a weight in a step of Adam at the usual learning rate, for any gradient."""
STEPS_OF_A_NUDGE = 100


@dataclass(frozen=True)
class Rollout:
    """One answer, and the log-probabilities that its server reported."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True)
class LogprobMismatch:
    """Distance of the log-probabilities of sampled tokens from the trainer's, in nats."""

    mean: float
    p99: float
    tokens: int


class TrainedPolicy:
    """The trained weights, in float32."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._dice = torch.Generator().manual_seed(0)

    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor.detach()) for name, tensor in self.model.named_parameters()]

    def nudge(self) -> None:
        """Changes every weight by the amount of a hundred steps in random directions."""
        size = STEP_OF_ADAM * math.sqrt(STEPS_OF_A_NUDGE)
        for _, tensor in self.named_tensors():
            tensor += size * torch.randn(tensor.shape, generator=self._dice)

    def mismatch(self, answers: Sequence[Rollout], *, rounded: bool) -> LogprobMismatch:
        """Compares the reported log-probabilities with the trainer's, whose weights are rounded to bf16 if `rounded`.

        The trainer computes in float32 in both cases.
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
        reported = torch.tensor([answer.logprobs for answer in answers])
        distance = (reported - true).abs().flatten()
        return LogprobMismatch(distance.mean().item(), distance.quantile(0.99).item(), len(distance))

    def _logprobs(self, answers: Sequence[Rollout]) -> torch.Tensor:
        """Returns the log-probability of each token of answers with equal lengths, [answers, tokens] float32."""
        tokens = torch.tensor([[*answer.prompt, *answer.tokens] for answer in answers])
        sampled = torch.tensor([answer.tokens for answer in answers])
        logits = self.model(tokens, use_cache=False, logits_to_keep=sampled.shape[1] + 1).logits[:, :-1]
        return torch.gather(logits.log_softmax(-1), -1, sampled[..., None])[..., 0]

    def generate_s(self, prompts: Sequence[Sequence[int]], n: int, max_tokens: int) -> float:
        """Returns the seconds in which `model.generate` generates n answers to each prompt, all in one batch."""
        begin = time.perf_counter()
        generated = self.model.generate(  # type: ignore[operator]
            torch.tensor(prompts), attention_mask=torch.ones(len(prompts), len(prompts[0])), do_sample=True, top_k=0,
            top_p=1.0, num_return_sequences=n, min_new_tokens=max_tokens, max_new_tokens=max_tokens, pad_token_id=0,
        )  # fmt: skip
        assert generated.shape == (len(prompts) * n, len(prompts[0]) + max_tokens)
        return time.perf_counter() - begin

    def step_s(self, group: Sequence[Rollout]) -> float:
        """Returns the seconds of a forward and a backward pass over these answers. No weight changes."""
        advantages = torch.linspace(-1, 1, len(group))[:, None]
        begin = time.perf_counter()
        logprobs = self._logprobs(group)
        loss = -(advantages * (logprobs - logprobs.detach()).exp()).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        taken = time.perf_counter() - begin
        self.model.zero_grad(set_to_none=True)
        return taken
