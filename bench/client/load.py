"""Sends timed requests to a server: one group with n choices, several groups at once, or n separate requests.

The first token of a choice is timed when the first text of the choice arrives, for every server alike.
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import httpx
import msgspec

from bench.client.stream import follow
from bench.program.command_line import add_check, benchmark_parser, numbers
from motet.cli.conversation import Conversation
from motet.errors import EngineError
from motet.models.smollm2 import DEFAULT_MODEL

TIMEOUT_S = 900.0
PATH = "/v1/completions"


def load_parser(
    module: str, doc: str | None, *, length: Callable[[str], object] = int, **defaults: object
) -> argparse.ArgumentParser:
    """Returns a parser with the flags of a benchmark that sends requests.

    `length` parses a number of tokens; `defaults` are the defaults of `ns`, `prompt_tokens`, `max_tokens` and
    `repeats`.
    """
    parser = benchmark_parser(module, doc)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model of the servers that the benchmark starts")
    parser.add_argument("--ns", type=numbers, help="values of n, the number of choices, e.g. 1,8,32")
    parser.add_argument("--prompt-tokens", type=length, help="number of tokens of a prompt")
    parser.add_argument("--max-tokens", type=length, help="number of tokens of a choice")
    parser.add_argument("--repeats", type=int, help="number of measurements of each case")
    add_check(parser)
    parser.set_defaults(**defaults)
    return parser


@dataclass(frozen=True)
class LoadSetup:
    """The requests that a benchmark sends."""

    ns: tuple[int, ...]
    prompt_tokens: int
    max_tokens: int
    repeats: int

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "LoadSetup":
        return cls(arguments.ns, arguments.prompt_tokens, arguments.max_tokens, arguments.repeats)


@dataclass(frozen=True)
class Timing:
    """Times of one request, or of several requests sent at once."""

    first_s: float
    """Time until the first choice had a token."""
    last_first_s: float
    """Time until every choice had a token."""
    total_s: float
    tokens: int
    blocks_used: int = 0
    """Number of KV blocks in use when every choice had its first token."""

    @property
    def decode_tokens_per_s(self) -> float:
        """Returns all tokens divided by the time after the last first token."""
        return self.tokens / (self.total_s - self.last_first_s)


def median_timing(timings: list[Timing]) -> Timing:
    """Returns the median of each time, and the maximum number of blocks."""
    return Timing(
        first_s=median(t.first_s for t in timings),
        last_first_s=median(t.last_first_s for t in timings),
        total_s=median(t.total_s for t in timings),
        tokens=timings[0].tokens,
        blocks_used=max(t.blocks_used for t in timings),
    )


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _TokenChoice(msgspec.Struct):
    token_ids: list[int]


class _TokenAnswer(msgspec.Struct):
    """An answer with token ids: for each choice (`choices`), or for its only choice (`tokens`, llama.cpp)."""

    choices: list[_TokenChoice] = []
    tokens: list[int] = []


@dataclass(frozen=True)
class TimedLoad:
    """A server, and the length of the answers that are requested."""

    client: httpx.AsyncClient
    max_tokens: int
    model: str | None = None
    """Name of the model in requests. None if the server has only one model."""
    prepare: Callable[[dict[str, object]], Awaitable[dict[str, object]]] | None = None
    """Changes a body before it is sent. The measured time includes this call."""
    count_blocks: bool = True
    """True to read the number of blocks in use from `/status`, which only Motet's servers have."""
    seeded: bool = True
    """True to send seeds. vLLM 0.32's CPU build crashes when it computes the prompt of a seeded request in chunks."""
    answers_at: str = PATH
    """Route whose answers can contain token ids."""
    usage_per_choice: bool = False
    """True for a server that reports the usage of a single choice, not the sum over all choices."""

    async def tokens_of(self, text: str) -> list[int]:
        response = await self.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
        response.raise_for_status()
        return msgspec.json.decode(response.content, type=_Tokens).tokens

    async def group(self, prompt: list[int], n: int, *, seed: int) -> Timing:
        """Times one request with n choices."""
        conversation, blocks_used = await self._follow(prompt, n, seed=seed)
        return timing_of([conversation], tokens=n * self.max_tokens, blocks_used=blocks_used)

    async def groups(self, prompts: Sequence[list[int]], n: int, *, seed: int) -> Timing:
        """Times requests with n choices, one for each prompt, all sent at once."""
        async with asyncio.TaskGroup() as tasks:
            sent = [tasks.create_task(self._follow(p, n, seed=seed + i * n)) for i, p in enumerate(prompts)]
        results = [task.result() for task in sent]
        conversations = [conversation for conversation, _ in results]
        tokens = len(prompts) * n * self.max_tokens
        return timing_of(conversations, tokens=tokens, blocks_used=max(blocks for _, blocks in results))

    async def separate(self, prompt: list[int], n: int, *, seed: int) -> Timing:
        """Times the choices of a group as n requests with one choice each, sent at once."""
        return await self.groups([prompt] * n, 1, seed=seed)

    async def answer(self, prompt: list[int], *, seed: int) -> list[int]:
        """Returns the tokens of one answer, which is not streamed."""
        body = self._body(prompt, 1, seed=seed) | {"return_token_ids": True}
        del body["stream"], body["stream_options"]
        if self.prepare is not None:
            body = await self.prepare(body)
        response = await self.client.post(self.answers_at, json=body)
        if response.status_code != httpx.codes.OK:
            raise EngineError(f"{response.status_code}: {response.text}")
        answer = msgspec.json.decode(response.content, type=_TokenAnswer)
        tokens = answer.choices[0].token_ids if answer.choices else answer.tokens
        if len(tokens) != self.max_tokens:
            raise EngineError(f"requested {self.max_tokens} tokens, but the server generated {len(tokens)}")
        return tokens

    async def _follow(self, prompt: list[int], n: int, *, seed: int) -> tuple[Conversation, int]:
        conversation, blocks_used = Conversation(n), 0
        body = self._body(prompt, n, seed=seed)
        if self.prepare is not None:
            body = await self.prepare(body)
        async with asyncio.timeout(TIMEOUT_S):
            if self.count_blocks:
                blocks_used = await self._follow_and_count(conversation, body)
            else:
                await follow(self.client, PATH, body, conversation.feed)
        expected = self.max_tokens if self.usage_per_choice else n * self.max_tokens
        if conversation.usage is None or conversation.usage.completion_tokens != expected:
            raise EngineError(f"requested {expected} tokens, but the server reported {conversation.usage}")
        return conversation, blocks_used

    def _body(self, prompt: list[int], n: int, *, seed: int) -> dict[str, object]:
        body: dict[str, object] = {
            "prompt": prompt,
            "n": n,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.seeded:
            body["seed"] = seed
        if self.model is not None:
            body["model"] = self.model
        return body

    async def _follow_and_count(self, conversation: Conversation, body: Mapping[str, object]) -> int:
        """Reads the answer, and returns the number of blocks in use when every choice had its first token."""
        started = asyncio.Event()

        def feed(line: str) -> None:
            conversation.feed(line)
            if not started.is_set() and (conversation.done or last_first_s(conversation) is not None):
                started.set()

        async with asyncio.TaskGroup() as tasks:
            counting = tasks.create_task(self._blocks_used(started))
            await follow(self.client, PATH, body, feed)
            started.set()
        return counting.result()

    async def _blocks_used(self, started: asyncio.Event) -> int:
        await started.wait()
        status = await self.client.get("/status")
        return sum(worker["blocks_used"] for worker in status.json()["workers"])


def open_client(url: str) -> httpx.AsyncClient:
    """Returns a client without a limit on connections."""
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None))


def last_first_s(conversation: Conversation) -> float | None:
    """Returns the seconds until every answer had text. None if an answer has no text yet."""
    times = [answer.first_s for answer in conversation.answers if answer.first_s is not None]
    return max(times) if times and len(times) == len(conversation.answers) else None


def timing_of(conversations: list[Conversation], *, tokens: int, blocks_used: int) -> Timing:
    return Timing(
        first_s=min(conversation.first_s or 0.0 for conversation in conversations),
        last_first_s=max(last_first_s(conversation) or 0.0 for conversation in conversations),
        total_s=max(conversation.total_s or 0.0 for conversation in conversations),
        tokens=tokens,
        blocks_used=blocks_used,
    )
