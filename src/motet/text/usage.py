"""Token counts of a group. The prompt is counted once, however many choices are made of it."""

import msgspec


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    """Summed over the choices; tokens whose text a stop string cut off are counted, they were made."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was in the prefix cache."""
    reasoning_tokens: int = 0
    """Completion tokens that are told apart as thoughts, summed over the choices."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: "Usage") -> "Usage":
        """Of several groups of one request."""
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
        )
