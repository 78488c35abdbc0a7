"""The schemas of a server's responses, and their conversion to the output objects."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from motet.errors import EngineError
from motet.llm.outputs import (
    CompletionOutput,
    ContinuationScore,
    Logprob,
    RequestOutput,
    ScoreOutput,
    TokenLogprobs,
    ToolCall,
)

TOKEN_ID_PREFIX: Final = "token_id:"
"""Start of `token` in the log-probabilities of answers without text."""


class SentLogprob(msgspec.Struct, frozen=True, gc=False):
    token_id: int
    logprob: float
    token: str = ""
    rank: int | None = None

    @property
    def entry(self) -> Logprob:
        return Logprob(self.logprob, self.rank, None if self.token.startswith(TOKEN_ID_PREFIX) else self.token)


class SampledLogprob(SentLogprob, frozen=True, gc=False):
    top_logprobs: Sequence[SentLogprob] = ()

    @property
    def entries(self) -> TokenLogprobs:
        return {self.token_id: self.entry, **{top.token_id: top.entry for top in self.top_logprobs}}


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    content: list[SampledLogprob]


class SentMessage(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


class SentChoice(msgspec.Struct, frozen=True):
    """A choice of an answer, or a piece of a choice in a stream."""

    index: int
    text: str = ""
    token_ids: list[int] | None = None
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    message: SentMessage | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class SentUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


class GeneratedAnswer(msgspec.Struct, frozen=True):
    """The body of a response of `/inference/v1/generate`, or an event of its stream."""

    request_id: str
    choices: list[SentChoice]
    usage: SentUsage | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    groups: list[dict[str, object]] | None = None


class TokenizedText(msgspec.Struct, frozen=True):
    """The body of a response of `/tokenize`."""

    tokens: list[int]


class DetokenizedText(msgspec.Struct, frozen=True):
    """The body of a response of `/detokenize`."""

    prompt: str


class SentModel(msgspec.Struct, frozen=True):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    default_sampling_params: dict[str, int | float] | None = None


class ModelList(msgspec.Struct, frozen=True):
    """The body of a response of `/v1/models`."""

    data: list[SentModel]


class SentScore(msgspec.Struct, frozen=True):
    index: int
    logprob: float
    mean_logprob: float
    is_greedy: bool
    token_ids: list[int]
    token_logprobs: list[float]


class SentScores(msgspec.Struct, frozen=True):
    """The body of a response of `/v1/score`."""

    id: str
    scores: list[SentScore]
    usage: SentUsage | None = None


def completion_output(choice: SentChoice) -> CompletionOutput:
    """Returns the output for a complete choice, or for a piece of a choice."""
    output = CompletionOutput(
        index=choice.index,
        text=choice.text,
        token_ids=choice.token_ids or [],
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )
    if choice.logprobs is not None:
        output.logprobs = [entry.entries for entry in choice.logprobs.content]
        output.cumulative_logprob = math.fsum(entry.logprob for entry in choice.logprobs.content)
    if choice.message is not None:
        output.content, output.reasoning = choice.message.content, choice.message.reasoning
        output.tool_calls = choice.message.tool_calls or []
    return output


def request_output(
    answer: GeneratedAnswer, *, prompt: str | None, prompt_token_ids: Sequence[int] | None
) -> RequestOutput:
    """Returns the output for a complete answer, with the choices in the order of their indices."""
    return RequestOutput(
        request_id=answer.request_id,
        prompt=prompt,
        prompt_token_ids=None if prompt_token_ids is None else [*prompt_token_ids],
        outputs=sorted(map(completion_output, answer.choices), key=lambda output: output.index),
        prompt_logprobs=answer.prompt_logprobs,
        num_cached_tokens=None if answer.usage is None else answer.usage.cached_tokens,
        group=answer.groups[0] if answer.groups else None,
    )


def score_output(answer: SentScores) -> ScoreOutput:
    """Returns the output for the scores of continuations."""
    scores = [ContinuationScore(**msgspec.structs.asdict(score)) for score in answer.scores]
    return ScoreOutput(
        request_id=answer.id,
        scores=scores,
        num_cached_tokens=None if answer.usage is None else answer.usage.cached_tokens,
    )


class GrowingOutput:
    """The output of a stream so far."""

    def __init__(self, *, prompt: str | None, prompt_token_ids: Sequence[int], keep: bool) -> None:
        """`keep`: False if only the new part of each step is used, so that a long stream takes no memory."""
        self.num_ended = 0
        """Number of choices that have ended."""
        self._keep = keep
        self._prompt = prompt
        self._prompt_token_ids = [*prompt_token_ids]
        self._outputs: dict[int, CompletionOutput] = {}
        self._last: GeneratedAnswer | None = None
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._group: Mapping[str, object] | None = None
        self._cached_tokens: int | None = None

    def add(self, events: Sequence[GeneratedAnswer]) -> RequestOutput:
        """Adds events and returns what they add to each choice, in the order of the indices."""
        new: dict[int, CompletionOutput] = {}
        for event in events:
            self._last = event
            self._prompt_logprobs = event.prompt_logprobs or self._prompt_logprobs
            self._group = event.groups[0] if event.groups else self._group
            if event.usage is not None:
                self._cached_tokens = event.usage.cached_tokens
            for choice in event.choices:
                self.num_ended += choice.finish_reason is not None
                for known in (new, self._outputs) if self._keep else (new,):
                    piece = completion_output(choice)
                    if (before := known.setdefault(piece.index, piece)) is not piece:
                        _extend(before, piece)
        return self._output(new)

    def so_far(self, *, finished: bool) -> RequestOutput:
        """Returns everything that was generated so far."""
        copies = {
            index: replace(output, token_ids=[*output.token_ids], logprobs=output.logprobs and [*output.logprobs])
            for index, output in self._outputs.items()
        }
        return replace(self._output(copies), finished=finished)

    def _output(self, outputs: Mapping[int, CompletionOutput]) -> RequestOutput:
        if self._last is None:
            raise EngineError("The stream of the server has no events.")
        return RequestOutput(
            request_id=self._last.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[outputs[index] for index in sorted(outputs)],
            finished=False,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._cached_tokens,
            group=self._group,
        )


def _extend(output: CompletionOutput, piece: CompletionOutput) -> None:
    """Adds a further piece of a choice."""
    output.text += piece.text
    output.token_ids += piece.token_ids
    output.finish_reason, output.stop_reason = piece.finish_reason, piece.stop_reason
    if output.logprobs is not None and piece.logprobs is not None:
        output.logprobs += piece.logprobs
        output.cumulative_logprob = (output.cumulative_logprob or 0.0) + (piece.cumulative_logprob or 0.0)
