"""Rollouts from Motet, as TRL's `rollout_func` returns them.

This module does not import TRL, so other trainers can use it too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from motet import LLM, SamplingParams

Chat = Sequence[Mapping[str, str]]
"""The messages of one prompt."""


@dataclass(frozen=True)
class Sampler:
    """The model that generates answers, and the sampling parameters."""

    llm: LLM
    """The model, with a server of its own or on a running server."""
    n: int
    """Number of answers per prompt."""
    max_tokens: int
    temperature: float = 1.0
    adapter: str | None = None
    """Name of the adapter that generates the answers; None for the model itself."""

    def rollouts(self, prompts: Sequence[Chat], *, seed: int) -> dict[str, list[list[int]] | list[list[float]]]:
        """Returns n answers for each prompt, in the order of the prompts.

        The keys are TRL's: `prompt_ids`, `completion_ids`, and `logprobs`, the log-probability of each sampled token
        under the weights that sampled it. Equal seeds give equal answers; prompt i uses the n seeds from seed + i x n
        on. The n answers of a prompt are one request, which computes the prompt and stores its KV once.
        """
        parameters = [
            SamplingParams(
                n=self.n, max_tokens=self.max_tokens, temperature=self.temperature, seed=seed + i * self.n, logprobs=0
            )
            for i in range(len(prompts))
        ]
        outputs = self.llm.chat(prompts, parameters, use_tqdm=False, adapter=self.adapter)
        choices = [choice for output in outputs for choice in output.outputs]
        return {
            "prompt_ids": [output.prompt_token_ids or [] for output in outputs for _ in range(self.n)],
            "completion_ids": [choice.token_ids for choice in choices],
            "logprobs": [
                [entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs or (), strict=True)]
                for choice in choices
            ],
        }
