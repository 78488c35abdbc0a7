"""The bodies of the derender routes (`derender`): generated tokens, and the requests that they answer.

stream: false     `generate_response` or `generate_responses`: entire answers of `/inference/v1/generate`
stream: true      `generate_chunk`: one chunk of such an answer, with the `stream_state` of the chunk before
"""

from collections.abc import Container, Iterator, Sequence
from typing import Annotated, ClassVar, Self

from pydantic import Field, PlainValidator, model_validator

from motet.api.generation.request_fields import MAX_STOP_CHARS, TokenIds, check_token_ids
from motet.api.http.failure import FieldError, invalid_value, missing_parameter
from motet.api.http.schema import OpenSchema, Schema
from motet.api.openai.chat_schema import ChatRequest
from motet.api.openai.completions import CompletionRequest
from motet.text.choice import WorkerReason
from motet.types import ChoiceDelta, Finish, FinishReason, TokenLogprob

UNKNOWN_PROMPT = [0]
"""Placeholder for a prompt that the client did not send, while the request is planned."""
MAX_ID_CHARS = 200
NO_GENERATION: dict[str, object] = {"stream": False, "stream_options": None, "group": None, "kv_transfer_params": None}
"""Values of the fields that only affect how an answer is generated."""


class GeneratedToken(OpenSchema):
    token_id: int | None = Field(None, ge=0)
    token: str = Field("", max_length=MAX_ID_CHARS)
    """`token_id:N`, for servers that do not send `token_id`."""
    logprob: float
    rank: int | None = None

    @model_validator(mode="after")
    def check_id(self) -> Self:
        number = self.token.removeprefix("token_id:")
        if self.token_id is None and not (number != self.token and number.isascii() and number.isdigit()):
            raise FieldError(invalid_value, "token_id", "it is missing, and there is no 'token' such as 'token_id:5'")
        return self

    @property
    def id(self) -> int:
        return int(self.token.removeprefix("token_id:")) if self.token_id is None else self.token_id


class SampledToken(GeneratedToken):
    top_logprobs: list[GeneratedToken] = Field(default_factory=list)


class GeneratedLogprobs(OpenSchema):
    content: list[SampledToken] | None = None


class GeneratedChunkChoice(OpenSchema):
    """The tokens of a chunk, which has none if it is only the end of the choice."""

    index: int = Field(ge=0, lt=2**31)
    token_ids: TokenIds = Field(default_factory=list)
    finish_reason: Annotated[FinishReason, Field(strict=False)] | None = None
    stop_reason: Annotated[str, Field(max_length=MAX_STOP_CHARS)] | int | None = None
    logprobs: GeneratedLogprobs | None = None

    @property
    def logprob_entries(self) -> tuple[TokenLogprob, ...] | None:
        """The log-probabilities of the tokens. There can be fewer than tokens."""
        if self.logprobs is None or self.logprobs.content is None:
            return None
        return tuple(
            TokenLogprob(one.id, one.logprob, one.rank or 0, tuple((top.id, top.logprob) for top in one.top_logprobs))
            for one in self.logprobs.content
        )

    @property
    def finish(self) -> Finish | None:
        if self.finish_reason is None:
            return None
        return Finish(self.finish_reason, self.stop_reason if isinstance(self.stop_reason, int) else None)

    def deltas(
        self, end_tokens: Container[int], logprobs: tuple[TokenLogprob, ...] | None = None
    ) -> Iterator[ChoiceDelta]:
        """Yields the tokens and the end of the choice as an engine reports them. `end_tokens`: tokens that can end the
        choice and have no text; any other last token belongs to the text. `logprobs`: one for each token, if any."""
        ids, finish = tuple(self.token_ids), self.finish
        has_end = finish is not None and len(ids) > 0 and not isinstance(self.stop_reason, str)
        if has_end and finish is not None and (ids[-1] == finish.stop_token_id or ids[-1] in end_tokens):
            yield ChoiceDelta(self.index, ids, logprobs, finish)
            return
        if ids:
            yield ChoiceDelta(self.index, ids, logprobs)
        if finish is not None:
            yield ChoiceDelta(self.index, (), () if logprobs else None, finish)


class GeneratedSpan(OpenSchema):
    version: str = Field(max_length=MAX_ID_CHARS)
    start: int = Field(ge=0)
    end: int = Field(ge=0)


class GeneratedChoice(GeneratedChunkChoice):
    """The tokens of an entire choice."""

    weight_versions: list[GeneratedSpan] = Field(default_factory=list)

    @model_validator(mode="after")
    def check_tokens(self) -> Self:
        if not self.token_ids:
            raise FieldError(invalid_value, "token_ids", "the array is empty; at least one token is needed")
        return self

    @property
    def finish(self) -> Finish:
        return super().finish or Finish(FinishReason.STOP)

    @property
    def reported_stop(self) -> str | None:
        """The stop string that ended the choice; None if it was not reported."""
        reason = self.stop_reason
        is_text = isinstance(reason, str) and reason and reason not in frozenset(WorkerReason)
        return str(reason) if is_text and self.finish.reason is FinishReason.STOP else None


class Generated(OpenSchema):
    """An answer of `/inference/v1/generate`."""

    request_id: str = Field(max_length=MAX_ID_CHARS)
    choices: list[GeneratedChoice] = Field(min_length=1)
    prompt_token_ids: TokenIds | None = None
    prompt_logprobs: list[dict[str, object] | None] | None = None
    kv_transfer_params: object = None

    @model_validator(mode="after")
    def check_indices(self) -> Self:
        if len({choice.index for choice in self.choices}) < len(self.choices):
            raise FieldError(invalid_value, "choices", "two choices have the same index")
        return self


class GeneratedUsage(OpenSchema):
    prompt_tokens: int = Field(0, ge=0)
    completion_tokens: int = Field(0, ge=0)


class GeneratedChunk(OpenSchema):
    """A chunk of a streamed answer of `/inference/v1/generate`."""

    request_id: str = Field(max_length=MAX_ID_CHARS)
    choices: list[GeneratedChunkChoice] = Field(max_length=1)
    prompt_token_ids: TokenIds | None = None
    prompt_logprobs: list[dict[str, object] | None] | None = None
    usage: GeneratedUsage | None = None


class StreamState(Schema):
    """The state of a choice after a chunk. The client sends it back unchanged with the next chunk."""

    output_token_ids: TokenIds = Field(default_factory=list)
    """Output tokens that have to be read again; all of them if the answer has parts or stop strings."""
    prompt_token_ids: TokenIds = Field(default_factory=list)
    """The last tokens of the prompt, on which the text of the first output tokens depends."""
    num_chars: int = Field(0, ge=0)
    """Number of characters of the text so far."""
    role_sent: bool = False


class DerenderFields(Schema):
    has_token_ids = True
    whole: ClassVar[str] = ""
    """The field with entire answers."""

    stream: bool = False
    model: str | None = None
    generate_chunk: GeneratedChunk | None = None
    stream_state: StreamState | None = None

    @model_validator(mode="after")
    def check_mode(self) -> Self:
        needed, unused = ("generate_chunk", self.whole) if self.stream else (self.whole, "generate_chunk")
        if getattr(self, needed) is None:
            raise FieldError(missing_parameter, needed)
        for name in (unused,) if self.stream else (unused, "stream_state"):
            if getattr(self, name) is not None:
                raise FieldError(invalid_value, name, f"it cannot be used with 'stream' {str(self.stream).lower()}")
        return self

    @property
    def chunk(self) -> GeneratedChunk:
        assert self.generate_chunk is not None  # checked by `check_mode`
        return self.generate_chunk

    @property
    def index(self) -> int:
        """The index of the choice whose chunk this is."""
        return self.chunk.choices[0].index if self.chunk.choices else 0

    @property
    def state(self) -> StreamState:
        return self.stream_state or StreamState.model_validate({})


class ChatDerender(DerenderFields):
    whole = "generate_response"

    generate_response: Generated | None = None
    prompt_tokens: int | None = Field(None, ge=0)
    prompt_token_ids: TokenIds | None = None
    chat_request: ChatRequest | None = None

    @property
    def responses(self) -> list[Generated]:
        return [] if self.generate_response is None else [self.generate_response]

    @property
    def planned_request(self) -> ChatRequest:
        chat = self.chat_request or ChatRequest.model_construct(messages=[])
        source: Generated | GeneratedChunk = self.chunk if self.stream else self.responses[0]
        prompt = self.prompt_token_ids or source.prompt_token_ids or chat.prompt_token_ids
        if prompt is None and self.stream:
            prompt = self.state.prompt_token_ids or UNKNOWN_PROMPT
        if prompt is None and self.chat_request is None:
            prompt = UNKNOWN_PROMPT
        num_top = num_alternatives([source])
        logprobs: dict[str, object] = {"logprobs": num_top is not None}
        if num_top is None or not chat.logprobs:
            logprobs["top_logprobs"] = num_top
        ids = {"model": self.model or chat.model, "prompt_token_ids": prompt, "n": max(1, len(source.choices))}
        return chat.model_copy(update=NO_GENERATION | ids | logprobs)


def _each_ids(value: object) -> object:
    return None if value is None else check_token_ids(value)


IdsOrNull = Annotated[list[int] | None, PlainValidator(_each_ids, json_schema_input_type=list[int] | None)]


class CompletionDerender(DerenderFields):
    whole = "generate_responses"

    generate_responses: list[Generated] | None = Field(None, min_length=1)
    prompt_tokens: list[Annotated[int, Field(ge=0)]] | None = None
    prompt_token_ids: list[IdsOrNull] | None = None
    completion_request: CompletionRequest | None = None

    @model_validator(mode="before")
    @classmethod
    def list_prompts(cls, data: object) -> object:
        """Reads the fields about the only prompt of a chunk, which are not lists of prompts."""
        if not isinstance(data, dict) or not data.get("stream"):
            return data
        named = ("prompt_tokens", "prompt_token_ids")
        return data | {name: [data[name]] for name in named if data.get(name) is not None}

    @model_validator(mode="after")
    def check_lengths(self) -> Self:
        num_prompts = 1 if self.stream else len(self.responses)
        for field, given in (("prompt_tokens", self.prompt_tokens), ("prompt_token_ids", self.prompt_token_ids)):
            if given is not None and len(given) != num_prompts:
                why = f"expected {num_prompts} entries, one for each response, but got {len(given)}"
                raise FieldError(invalid_value, field, why)
        for number, one in enumerate(self.responses):
            n = len(self.responses[0].choices)
            if sorted(choice.index for choice in one.choices) != list(range(n)):
                why = f"expected {n} choices, as in the first response, with the indices from 0 to {n - 1}"
                raise FieldError(invalid_value, f"generate_responses[{number}].choices", why)
        return self

    @property
    def responses(self) -> list[Generated]:
        return self.generate_responses or []

    @property
    def planned_request(self) -> CompletionRequest:
        sources: Sequence[Generated | GeneratedChunk] = [self.chunk] if self.stream else self.responses
        request = self.completion_request or CompletionRequest.model_validate({"prompt": UNKNOWN_PROMPT})
        given: Sequence[list[int] | None] = self.prompt_token_ids or [None] * len(sources)
        own = self.state.prompt_token_ids if self.stream else None
        prompts = [
            ids or one.prompt_token_ids or own or UNKNOWN_PROMPT for ids, one in zip(given, sources, strict=True)
        ]
        num_top = num_alternatives(sources)
        form = {"structured_outputs": None, "response_format": None, "regex": None, "ebnf": None}
        one_token = {"max_tokens": 1, "max_completion_tokens": None, "min_tokens": 0, "best_of": None, "echo": False}
        fields = {
            "model": self.model or request.model,
            "prompt": tuple(prompts),
            "n": max(1, len(sources[0].choices)),
            "logprobs": num_top if num_top is None or request.logprobs is None else request.logprobs,
            "prompt_logprobs": None,
        }
        return request.model_copy(update=NO_GENERATION | form | one_token | fields)


def num_alternatives(sources: Sequence[Generated | GeneratedChunk]) -> int | None:
    """Returns the maximum number of alternatives to a token; None without log-probabilities."""
    given = [choice.logprobs for one in sources for choice in one.choices]
    entries = [one.content for one in given if one is not None and one.content is not None]
    return max((len(token.top_logprobs) for content in entries for token in content), default=0) if entries else None
