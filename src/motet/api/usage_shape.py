"""`usage` as OpenAI writes it."""

import msgspec

from motet.text.usage import Usage


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class UsageShape(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_shape(usage: Usage) -> UsageShape:
    return UsageShape(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
    )


def usage_json(usage: Usage) -> bytes:
    return msgspec.json.encode(usage_shape(usage))
