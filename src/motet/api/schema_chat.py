"""The body of `POST /v1/chat/completions`."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from motet.api.schema_shared import IGNORED_FIELDS, GeneratingFields, SamplingFields, Schema
from motet.errors import RequestError

MAX_TOP_LOGPROBS = 20


class ContentPart(Schema):
    """One part of a message; only text is read, so that any other kind can be named in the answer."""

    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None
    refusal: str | None = None

    def check(self, param: str) -> None:
        """Raises `RequestError`; `param` is where the part stands in the body."""
        if self.type not in ("text", "refusal"):
            raise RequestError(
                f"Invalid content part '{param}': '{self.type}' is not supported by this model; only 'text' is.",
                param=param,
                code="unsupported_value",
            )
        if (self.text if self.type == "text" else self.refusal) is None:
            missing = f"{param}.{self.type}"
            raise RequestError(
                f"Missing required parameter: '{missing}'.", param=missing, code="missing_required_parameter"
            )
        for name in self.model_extra or {}:
            raise RequestError(
                f"Unknown parameter: '{param}.{name}'.", param=f"{param}.{name}", code="unknown_parameter"
            )


def _as_parts(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(Schema):
    """One turn. `tool_calls` and `tool_call_id` of earlier turns go to the chat template as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[ContentPart], BeforeValidator(_as_parts)] = Field(default_factory=list)
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, object]] | None = None
    tool_call_id: str | None = None

    ignored = frozenset({"annotations"})
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"audio": (), "function_call": ()}

    def check(self, param: str) -> None:
        """Raises `RequestError`; `param` is where the message stands in the body."""
        for number, part in enumerate(self.content):
            part.check(f"{param}.content[{number}]")
        if not self.content and not self.tool_calls and self.role != "assistant":
            raise RequestError(
                f"Missing required parameter: '{param}.content'.",
                param=f"{param}.content",
                code="missing_required_parameter",
            )

    @property
    def text(self) -> str:
        return "\n".join((part.text if part.text is not None else part.refusal) or "" for part in self.content)

    def for_template(self) -> dict[str, object]:
        """The turn as the chat template gets it, its parts joined to one string."""
        turn: dict[str, object] = {"role": self.role, "content": self.text if self.content else (self.refusal or "")}
        optional = {"name": self.name, "tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id}
        return turn | {key: value for key, value in optional.items() if value is not None}


class ChatPrompt(Schema):
    """The fields that make the prompt; the same for an answer and for `/tokenize`."""

    messages: list[Message] = Field(default_factory=list)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict)

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


class ChatRequest(ChatPrompt, SamplingFields, GeneratingFields):
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
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "prompt_cache_options": (),
        "reasoning_effort": ("none",),
        "response_format": ({"type": "text"},),
        "spaces_between_special_tokens": (True,),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "use_beam_search": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    return_token_ids: bool = False

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
