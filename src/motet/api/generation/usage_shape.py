"""`usage` in the shape of OpenAI's chats and completions."""

import msgspec

from motet.types import Usage


def usage_shape(usage: Usage, *, reasoning: bool = False) -> dict[str, object]:
    """Returns `usage` in OpenAI's shape, without details that were not reported. `reasoning`: True to include the
    number of reasoning tokens, even if it is 0, as OpenAI's chats do."""
    shape: dict[str, object] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens is not None:
        shape["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if reasoning and usage.reasoning_tokens is not None:
        shape["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return shape


def usage_json(usage: Usage) -> bytes:
    return msgspec.json.encode(usage_shape(usage))


def chat_usage_json(usage: Usage | None) -> bytes:
    """Returns null if a text upstream has not reported its usage."""
    return b"null" if usage is None else msgspec.json.encode(usage_shape(usage, reasoning=True))
