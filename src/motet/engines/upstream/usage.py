"""What a group used, from what its requests told: each prompt once, the choices summed. Pure.

What was not told is not guessed: when one request of the group has not told, the group's usage is not known.
"""

from collections.abc import Mapping, Sequence

from motet.engines.upstream.base import TextUsage


def summed(usages: Mapping[int, TextUsage | None], *, prompts_at: Sequence[int], num_requests: int) -> TextUsage | None:
    """`usages`: by the first choice of each request that has ended; `prompts_at`: the requests whose prompts count."""
    told = [usage for usage in usages.values() if usage is not None]
    if len(told) < num_requests:
        return None
    prompts = [usage for at in prompts_at if (usage := usages[at]) is not None]
    return TextUsage(
        prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
        completion_tokens=sum(usage.completion_tokens for usage in told),
        cached_tokens=_sum([usage.cached_tokens for usage in prompts]),
        reasoning_tokens=_sum([usage.reasoning_tokens for usage in told]),
    )


def _sum(values: Sequence[int | None]) -> int | None:
    """None if one is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
