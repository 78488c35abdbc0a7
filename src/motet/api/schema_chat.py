"""The body of `POST /v1/chat/completions`."""

from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from motet.api.schema_message import Message
from motet.api.schema_shared import IGNORED_FIELDS, GeneratingFields
from motet.api.schema_structured import FormattedFields
from motet.api.schema_tools import ToolFields
from motet.errors import RequestError

MAX_TOP_LOGPROBS = 20

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatPrompt(ToolFields):
    """The fields that make the prompt; the same for an answer and for `/tokenize`."""

    messages: list[Message] = Field(default_factory=list)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)
    reasoning_effort: ReasoningEffort | None = None

    @property
    def ends_with_generation_prompt(self) -> bool:
        return self.add_generation_prompt and not self.continue_final_message

    @model_validator(mode="after")
    def check_messages(self) -> Self:
        for number, message in enumerate(self.messages):
            message.check(f"messages[{number}]")
        return self

    @model_validator(mode="after")
    def check_end_of_prompt(self) -> Self:
        if (
            self.continue_final_message
            and "add_generation_prompt" in self.model_fields_set
            and self.add_generation_prompt
        ):
            raise RequestError(
                "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
                param="continue_final_message",
            )
        return self


class ChatRequest(ChatPrompt, FormattedFields, GeneratingFields):
    ignored = IGNORED_FIELDS
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "add_special_tokens": (False,),
        "audio": (),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "prompt_cache_options": (),
        "spaces_between_special_tokens": (True,),
        "store": (False,),
        "use_beam_search": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    return_token_ids: bool = False
    include_reasoning: bool = True
    """Whether what the model thinks is in the answer."""
    separate_reasoning: bool = True
    """Whether it stands apart from the content."""

    @property
    def max_tokens_asked(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives wanted beside each token; None: no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def without_answer(self) -> Self:
        """The same prompt, and nothing asked of an answer that there will not be."""
        return self.model_copy(update={"n": 1, "logprobs": False, "top_logprobs": None})

    @model_validator(mode="after")
    def check_top_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                "Invalid 'top_logprobs': 'logprobs' must be true when 'top_logprobs' is given.", param="top_logprobs"
            )
        return self
