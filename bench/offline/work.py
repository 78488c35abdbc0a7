"""The prompts of the benchmark."""

import random
from dataclasses import dataclass

FIRST_TOKEN, LAST_TOKEN = 100, 20_000
"""Range of the token ids of prompts: ordinary tokens of every model that is measured."""


@dataclass(frozen=True)
class OfflineWork:
    """Prompts as token ids, each with the number of output tokens of its choices."""

    prompts: list[list[int]]
    max_tokens: list[int]
    n: int

    @classmethod
    def of_mixed_lengths(
        cls, count: int, *, n: int, prompt_tokens: int, max_tokens: int, vocab_size: int
    ) -> "OfflineWork":
        """Returns prompts whose lengths are between a tenth of the maximum and the maximum, the same in each run."""
        rng, last = random.Random(1), min(LAST_TOKEN, vocab_size - 1)
        lengths = [rng.randint(max(2, prompt_tokens // 10), prompt_tokens) for _ in range(count)]
        prompts = [[rng.randint(FIRST_TOKEN, last) for _ in range(length)] for length in lengths]
        return cls(prompts, [rng.randint(max(1, max_tokens // 10), max_tokens) for _ in prompts], n)

    def first(self, count: int) -> "OfflineWork":
        """Returns the first prompts only."""
        return OfflineWork(self.prompts[:count], self.max_tokens[:count], self.n)

    @property
    def num_tokens(self) -> int:
        """Number of output tokens."""
        return self.n * sum(self.max_tokens)
