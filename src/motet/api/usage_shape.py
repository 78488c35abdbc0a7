"""`usage` as OpenAI writes it."""

import msgspec
from msgspec import UNSET, UnsetType

from motet.engines.upstream.base import TextUsage
from motet.text.usage import Usage


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class UsageShape(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Of chats only: nothing is told apart elsewhere."""


def usage_shape(usage: Usage) -> UsageShape:
    return UsageShape(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
    )


def chat_usage_shape(usage: Usage) -> UsageShape:
    """As OpenAI does, reasoning is told of also where there is none."""
    details = CompletionTokensDetails(usage.reasoning_tokens)
    return msgspec.structs.replace(usage_shape(usage), completion_tokens_details=details)


def usage_json(usage: Usage) -> bytes:
    return msgspec.json.encode(usage_shape(usage))


def chat_usage_json(usage: Usage) -> bytes:
    return msgspec.json.encode(chat_usage_shape(usage))


class TextUsageShape(msgspec.Struct, frozen=True):
    """As far as another server has told."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


def text_usage_json(usage: TextUsage | None) -> bytes:
    """null where it is not known."""
    if usage is None:
        return b"null"
    cached, reasoning = usage.cached_tokens, usage.reasoning_tokens
    shape = TextUsageShape(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=UNSET if cached is None else PromptTokensDetails(cached),
        completion_tokens_details=UNSET if reasoning is None else CompletionTokensDetails(reasoning),
    )
    return msgspec.json.encode(shape)
