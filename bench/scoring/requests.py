"""Requests for log-probabilities, in the form that each server accepts.

    EchoedPrompts       prompts in one completions request with `echo`, as lm-evaluation-harness sends them
    TextWindow          one window of a text; only its last tokens are scored
    Decisions           questions about one input

`send` returns the log-probabilities that a client of the request needs, so that servers can be compared.
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
"""Logit bias with which llama.cpp's server generates one of the options of a decision."""


class Dialect(Enum):
    """The API of a server for log-probabilities."""

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
class ScoringClient:
    """Sends requests to a server, with a limit of concurrent requests."""

    server: ComparedServer
    dialect: Dialect
    limit: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(8))

    async def post(self, path: str, body: Mapping[str, object]) -> bytes:
        named = {**body, "model": self.server.model}
        async with self.limit:
            response = await self.server.client.post(path, json=named)
        if response.status_code != httpx.codes.OK:
            raise EngineError(f"{response.status_code}: {response.text}")
        return response.content

    async def complete(self, **body: object) -> list[_ScoredChoice]:
        answer = await self.post(COMPLETIONS, {"temperature": 0.0, **body})
        return msgspec.json.decode(answer, type=_ScoredAnswer).choices


@dataclass(frozen=True)
class ReadScores:
    """The results that a client reads from the response to one request."""

    logprobs: Sequence[Sequence[float]]
    """For each prompt or option, the log-probabilities of its scored tokens. Empty if the server does not report
    them."""
    best: int | None = None
    """Index of the most likely option. None if the request has no options."""


class ScoringRequest(Protocol):
    """One request to Motet, or its equivalent for another server."""

    @property
    def num_prompts(self) -> int: ...

    async def prepare(self, motet: ScoringClient) -> None:
        """Called after Motet has responded, before the request is sent to another server."""

    async def send(self, client: ScoringClient) -> ReadScores: ...


@dataclass(frozen=True)
class EchoedPrompts:
    """A question with each of its options, as prompts of one request."""

    prompts: Sequence[list[int]]
    first: int
    """Index of the first token of each prompt whose log-probability is used."""

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    async def prepare(self, motet: ScoringClient) -> None:
        """Does nothing."""

    async def send(self, client: ScoringClient) -> ReadScores:
        choices = await client.complete(prompt=[*self.prompts], echo=True, logprobs=1, max_tokens=0)
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
    """Index of the first scored token. The tokens before it are scored in earlier windows."""

    @property
    def num_prompts(self) -> int:
        return 1

    async def prepare(self, motet: ScoringClient) -> None:
        """Does nothing."""

    async def send(self, client: ScoringClient) -> ReadScores:
        only_new = {"prompt_logprobs_from": self.first} if client.dialect is Dialect.MOTET else {}
        (choice,) = await client.complete(prompt=self.tokens, prompt_logprobs=0, max_tokens=1, **only_new)
        entries = choice.prompt_logprobs or []
        entries = entries[-(len(self.tokens) - self.first) :]
        found = [
            None if entry is None else entry[str(token)].logprob
            for entry, token in zip(entries, self.tokens[self.first :], strict=True)
        ]
        return ReadScores([_complete(found)])


@dataclass
class Decisions:
    """Questions about one input that are answered with yes or no.

    Motet gets one request, and renders the questions with the model's chat template. Other servers get a request for
    each question, with the tokens of Motet's prompt.
    """

    input: str
    questions: Sequence[str]
    prompts: Sequence["_DecisionPrompt"] = ()
    """The tokens of each question, after `prepare`."""

    @property
    def num_prompts(self) -> int:
        return len(self.questions)

    async def prepare(self, motet: ScoringClient) -> None:
        """Gets the tokens from Motet, which has cached the prompts of the questions."""
        answer = msgspec.json.decode(await motet.post(DECISIONS, self._body(return_token_ids=True)), type=_Decided)
        self.prompts = [
            _DecisionPrompt(one.prompt_token_ids, [tokens[0] for tokens in one.answer_token_ids])
            for one in answer.answers
        ]

    async def send(self, client: ScoringClient) -> ReadScores:
        match client.dialect:
            case Dialect.MOTET:
                answer = msgspec.json.decode(await client.post(DECISIONS, self._body()), type=_Decided)
                return ReadScores([[math.log(one.probability)] for one in answer.answers])
            case Dialect.VLLM:
                found = await asyncio.gather(*(_option_logprobs(client, prompt) for prompt in self.prompts))
                return ReadScores([[yes - math.log(math.exp(yes) + math.exp(no))] for yes, no in found])
            case Dialect.LLAMA:
                await asyncio.gather(*(_generate_option(client, prompt) for prompt in self.prompts))
                return ReadScores([])

    def _body(self, **options: object) -> dict[str, object]:
        questions = [{"type": "predicate", "instructions": question} for question in self.questions]
        return {"input": self.input, "questions": questions, **options}


@dataclass(frozen=True)
class _DecisionPrompt:
    tokens: list[int]
    options: list[int]
    """The first tokens of yes and no."""


async def _option_logprobs(client: ScoringClient, prompt: _DecisionPrompt) -> list[float]:
    """Returns the log-probabilities of the options as the next token, with a prompt that can be cached."""
    (choice,) = await client.complete(
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


async def _generate_option(client: ScoringClient, prompt: _DecisionPrompt) -> None:
    """Makes llama.cpp's server, which reports no log-probabilities of given tokens, generate the most likely option."""
    body = {
        "prompt": prompt.tokens,
        "n_predict": 1,
        "temperature": 0.0,
        "logit_bias": [[option, OPTION_BIAS] for option in prompt.options],
        "return_tokens": True,
        "cache_prompt": True,
    }
    (token,) = msgspec.json.decode(await client.post("/completion", body), type=_LlamaAnswer).tokens
    if token not in prompt.options:
        raise EngineError(f"the server generated {token}, not one of {prompt.options}")


def best_of(options: Sequence[Sequence[float]]) -> int:
    """Returns the index of the option with the highest sum of log-probabilities."""
    sums = [sum(option) for option in options]
    return sums.index(max(sums))


def _complete(logprobs: Sequence[float | None]) -> list[float]:
    known = [logprob for logprob in logprobs if logprob is not None]
    if len(known) != len(logprobs):
        raise EngineError("a scored token has no log-probability")
    return known
