"""Requests that read log-probabilities, in the form that each server has for them.

    EchoedPrompts       prompts in one completions request with `echo`, as lm-evaluation-harness sends them
    TextWindow          one window of a text; only its last tokens are scored
    Decisions           questions about one input

Each `send` returns the log-probabilities that a client of the request reads, so that servers can be compared.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import httpx
import msgspec

from bench.servers.compared_server import ComparedServer
from motet.errors import EngineError

COMPLETIONS, DECISIONS = "/v1/completions", "/v1/decisions"
OPTION_BIAS = 1000.0
"""Bias of the options of a decision on llama.cpp's server, which generates one of them."""


class Dialect(Enum):
    """The form of the requests that a server accepts for scores."""

    MOTET = "motet"
    VLLM = "vllm"
    LLAMA = "llama.cpp"


class _EchoLogprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class _Rank(msgspec.Struct):
    logprob: float


class _ScoredChoice(msgspec.Struct):
    logprobs: _EchoLogprobs | None = None
    prompt_logprobs: list[dict[str, _Rank] | None] | None = None


class _ScoredAnswer(msgspec.Struct):
    choices: list[_ScoredChoice]


class _DecidedAnswer(msgspec.Struct):
    probability: float
    prompt_token_ids: list[int] = []
    answer_token_ids: list[list[int]] = []
    """The tokens of yes and of no."""


class _Decided(msgspec.Struct):
    answers: list[_DecidedAnswer]


class _LlamaAnswer(msgspec.Struct):
    tokens: list[int]


@dataclass(frozen=True)
class ScoringTarget:
    """A server, and the number of requests that it gets at a time."""

    server: ComparedServer
    dialect: Dialect
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(8))

    async def post(self, path: str, body: Mapping[str, object]) -> bytes:
        named = {**body, "model": self.server.model}
        async with self.places:
            response = await self.server.client.post(path, json=named)
        if response.status_code != httpx.codes.OK:
            raise EngineError(f"{response.status_code}: {response.text}")
        return response.content

    async def complete(self, **body: object) -> list[_ScoredChoice]:
        answer = await self.post(COMPLETIONS, {"temperature": 0.0, **body})
        return msgspec.json.decode(answer, type=_ScoredAnswer).choices


@dataclass(frozen=True)
class ReadScores:
    """What a client reads from the answer to one request."""

    logprobs: Sequence[Sequence[float]]
    """For each prompt or option, the log-probabilities of its scored tokens. Empty if the server does not report
    them."""
    best: int | None = None
    """Number of the most likely option. None if the request has no options."""


class ScoringRequest(Protocol):
    """One request, or its equivalent on a server that needs another form."""

    @property
    def num_prompts(self) -> int: ...

    async def prepare(self, motet: ScoringTarget) -> None:
        """Called when Motet has answered, before the request is sent to another server."""

    async def send(self, to: ScoringTarget) -> ReadScores: ...


@dataclass(frozen=True)
class EchoedPrompts:
    """A question with each of its options, as prompts of one request."""

    prompts: Sequence[list[int]]
    first: int
    """The first token of each prompt whose log-probability the client uses."""

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    async def prepare(self, motet: ScoringTarget) -> None:
        """Needs nothing from Motet."""

    async def send(self, to: ScoringTarget) -> ReadScores:
        choices = await to.complete(prompt=[*self.prompts], echo=True, logprobs=1, max_tokens=0)
        scored = []
        for choice in choices:
            if choice.logprobs is None:
                raise EngineError("a choice has no log-probabilities")
            scored.append(_complete(choice.logprobs.token_logprobs[self.first :]))
        return ReadScores(scored, best_of(scored))


@dataclass(frozen=True)
class TextWindow:
    """One window of a text whose last tokens are scored, with the tokens before them as context."""

    tokens: list[int]
    first: int
    """The first token that is scored. The tokens before it are scored in earlier windows."""

    @property
    def num_prompts(self) -> int:
        return 1

    async def prepare(self, motet: ScoringTarget) -> None:
        """Needs nothing from Motet."""

    async def send(self, to: ScoringTarget) -> ReadScores:
        only_new = {"prompt_logprobs_from": self.first} if to.dialect is Dialect.MOTET else {}
        (choice,) = await to.complete(prompt=self.tokens, prompt_logprobs=0, max_tokens=1, **only_new)
        entries = choice.prompt_logprobs or []
        entries = entries[-(len(self.tokens) - self.first) :]
        found = [
            None if entry is None else entry[str(token)].logprob
            for entry, token in zip(entries, self.tokens[self.first :], strict=True)
        ]
        return ReadScores([_complete(found)])


@dataclass
class Decisions:
    """Questions about one input that are answered with yes or no: one request on Motet, one per question elsewhere.

    Motet renders the questions with the model's chat template. Other servers get the tokens of Motet's prompts.
    """

    source: str
    """The text that all questions are about."""
    questions: Sequence[str]
    prompts: Sequence["_DecisionPrompt"] = ()
    """The tokens of each question, after `prepare`."""

    @property
    def num_prompts(self) -> int:
        return len(self.questions)

    async def prepare(self, motet: ScoringTarget) -> None:
        """Reads the tokens from Motet, which has answered the questions before."""
        answer = msgspec.json.decode(await motet.post(DECISIONS, self._body(return_token_ids=True)), type=_Decided)
        self.prompts = [
            _DecisionPrompt(one.prompt_token_ids, [tokens[0] for tokens in one.answer_token_ids])
            for one in answer.answers
        ]

    async def send(self, to: ScoringTarget) -> ReadScores:
        match to.dialect:
            case Dialect.MOTET:
                answer = msgspec.json.decode(await to.post(DECISIONS, self._body()), type=_Decided)
                return ReadScores([[math.log(one.probability)] for one in answer.answers])
            case Dialect.VLLM:
                found = await asyncio.gather(*(_next_token(to, prompt) for prompt in self.prompts))
                return ReadScores([[yes - math.log(math.exp(yes) + math.exp(no))] for yes, no in found])
            case Dialect.LLAMA:
                await asyncio.gather(*(_generated(to, prompt) for prompt in self.prompts))
                return ReadScores([])

    def _body(self, **options: object) -> dict[str, object]:
        questions = [{"type": "predicate", "instructions": question} for question in self.questions]
        return {"input": self.source, "questions": questions, **options}


@dataclass(frozen=True)
class _DecisionPrompt:
    tokens: list[int]
    options: list[int]
    """The first tokens of yes and no."""


async def _next_token(to: ScoringTarget, prompt: _DecisionPrompt) -> list[float]:
    """Returns the log-probabilities of the options as the next token. The prompt is not scored, so it can be cached."""
    (choice,) = await to.complete(
        prompt=prompt.tokens,
        max_tokens=1,
        logprobs=len(prompt.options),
        logprob_token_ids=prompt.options,
        return_tokens_as_token_ids=True,
    )
    tops = (choice.logprobs.top_logprobs or [None])[0] if choice.logprobs else None
    if tops is None:
        raise EngineError("a choice has no log-probabilities")
    return [tops[f"token_id:{option}"] for option in prompt.options]


async def _generated(to: ScoringTarget, prompt: _DecisionPrompt) -> None:
    """Lets llama.cpp's server generate the most likely option. It reports no log-probabilities of given tokens."""
    body = {
        "prompt": prompt.tokens,
        "n_predict": 1,
        "temperature": 0.0,
        "logit_bias": [[option, OPTION_BIAS] for option in prompt.options],
        "return_tokens": True,
        "cache_prompt": True,
    }
    (token,) = msgspec.json.decode(await to.post("/completion", body), type=_LlamaAnswer).tokens
    if token not in prompt.options:
        raise EngineError(f"the server generated {token}, not one of {prompt.options}")


def best_of(options: Sequence[Sequence[float]]) -> int:
    """Returns the option with the highest sum of log-probabilities."""
    sums = [sum(option) for option in options]
    return sums.index(max(sums))


def _complete(logprobs: Sequence[float | None]) -> list[float]:
    known = [logprob for logprob in logprobs if logprob is not None]
    if len(known) != len(logprobs):
        raise EngineError("a scored token has no log-probability")
    return known
