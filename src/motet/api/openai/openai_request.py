"""The fields that chats and completions share."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from motet.api.generation.answer_form import FormattedFields
from motet.api.generation.extensions import NamedRequest, NvExtFields
from motet.api.generation.group_schema import SteeredFields
from motet.api.generation.request_fields import (
    IGNORED_FIELDS,
    NO_REPETITION_DETECTION,
    SAMPLING_NAMES,
    PromptLogprobs,
    RequestFields,
    ReturnedTokens,
    SamplingFields,
    StreamingFields,
    TokenNames,
    TruncationFields,
)


class OpenAIRequest(
    FormattedFields,
    PromptLogprobs,
    SamplingFields,
    TruncationFields,
    SteeredFields,
    RequestFields,
    NamedRequest,
    NvExtFields,
    StreamingFields,
    ReturnedTokens,
    TokenNames,
):
    """A request for n answers to each prompt."""

    has_token_ids = True
    aliases: ClassVar[Mapping[str, str]] = {**SAMPLING_NAMES, "rid": "request_id"}
    ignored = IGNORED_FIELDS | {"routed_experts_prompt_start"}
    refused = frozenset({"repetition_detection"})
    advice: ClassVar[Mapping[str, str]] = {"repetition_detection": NO_REPETITION_DETECTION}

    max_completion_tokens: int | None = Field(None, ge=1)
    """The same limit as `max_tokens`, over which it takes precedence: llm-d's sidecar sends both."""

    @property
    def requested_max_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
