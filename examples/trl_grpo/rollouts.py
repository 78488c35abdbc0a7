"""Rollouts from a running Motet server, as TRL's `rollout_func` returns them.

This module does not import TRL, so other trainers can use it too.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

TIMEOUT_S = 600.0
Chat = Sequence[Mapping[str, str]]
"""The messages of one prompt."""


@dataclass(frozen=True)
class Sampler:
    """The server that generates answers, and the sampling parameters."""

    server: str
    """URL of the server, for example http://127.0.0.1:8000."""
    n: int
    """Number of answers per prompt."""
    max_tokens: int
    temperature: float = 1.0
    model: str | None = None
    """Name of the model or adapter that generates the answers; None for the server's only model."""

    def rollouts(self, prompts: Sequence[Chat], *, seed: int) -> dict[str, list[list[int]] | list[list[float]]]:
        """Returns n answers for each prompt, in the order of the prompts.

        The keys are TRL's: `prompt_ids`, `completion_ids`, and `logprobs`, the log-probability of each sampled token
        under the weights that sampled it. Equal seeds give equal answers. Prompt i uses the seeds from seed + i x n on.
        """
        with httpx.Client(base_url=self.server, timeout=TIMEOUT_S) as http, ThreadPoolExecutor(len(prompts)) as threads:
            seeds = range(seed, seed + len(prompts) * self.n, self.n)
            answers = list(threads.map(lambda pair: self._request(http, *pair), zip(prompts, seeds, strict=True)))
        choices = [choice for answer in answers for choice in answer["choices"]]
        return {
            "prompt_ids": [answer["prompt_token_ids"] for answer in answers for _ in range(self.n)],
            "completion_ids": [choice["token_ids"] for choice in choices],
            "logprobs": [[token["logprob"] for token in choice["logprobs"]["content"]] for choice in choices],
        }

    def _request(self, http: httpx.Client, prompt: Chat, seed: int) -> dict[str, Any]:
        """Requests the n answers of one prompt in one request. The prompt is computed once, and its KV stored once."""
        body: dict[str, Any] = {
            "messages": prompt,
            "n": self.n,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": seed,
            "logprobs": True,
            "return_token_ids": True,
        }
        if self.model is not None:
            body["model"] = self.model
        response = http.post("/v1/chat/completions", json=body)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer
