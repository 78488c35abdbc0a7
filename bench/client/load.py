"""Sends timed requests to a server: one group of n, several at once, or n separate requests.

With every server, a choice has its first token when its first text arrives.
"""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import httpx
import msgspec

from bench.client.stream import follow
from motet.cli.conversation import Conversation
from motet.errors import EngineError
from motet.models.smollm2 import DEFAULT_MODEL

TIMEOUT_S = 900.0
PATH = "/v1/completions"


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def options(doc: str | None, *, length: Callable[[str], object] = int, **defaults: object) -> argparse.ArgumentParser:
    """Returns a parser with the flags of a benchmark that sends loads. `length` reads a length, `defaults` are those of
    `ns`, `prompt_tokens`, `max_tokens` and `repeats`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model of servers that are started here")
    parser.add_argument("--ns", type=numbers, help="numbers of choices, e.g. 1,8,32")
    parser.add_argument("--prompt-tokens", type=length, help="tokens of a prompt")
    parser.add_argument("--max-tokens", type=length, help="tokens of a choice")
    parser.add_argument("--repeats", type=int, help="measurements of each case")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a floor is missed")
    parser.set_defaults(**defaults)
    return parser


@dataclass(frozen=True)
class Setup:
    """The requests that a benchmark sends."""

    ns: tuple[int, ...]
    prompt_tokens: int
    max_tokens: int
    repeats: int

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Setup":
        return cls(options.ns, options.prompt_tokens, options.max_tokens, options.repeats)


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Timing:
    """The times of one request, or of n at once."""

    first_s: float
    """Time until the first choice had a token."""
    last_first_s: float
    """Time until every choice had one."""
    total_s: float
    tokens: int
    blocks_used: int = 0
    """KV blocks that groups held when every choice had its first token."""

    @property
    def decode_tokens_per_s(self) -> float:
        """Returns all tokens divided by the time after the last first token."""
        return self.tokens / (self.total_s - self.last_first_s)


def middle(timings: list[Timing]) -> Timing:
    """Returns the median of each time, and the highest number of blocks."""
    return Timing(
        first_s=median(t.first_s for t in timings),
        last_first_s=median(t.last_first_s for t in timings),
        total_s=median(t.total_s for t in timings),
        tokens=timings[0].tokens,
        blocks_used=max(t.blocks_used for t in timings),
    )


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Written(msgspec.Struct):
    token_ids: list[int]


class _Answer(msgspec.Struct):
    """An answer with its token ids: those of each choice, or of the only one."""

    choices: list[_Written] = []
    tokens: list[int] = []


@dataclass(frozen=True)
class Load:
    """A server, and the length of the answers that it is asked for."""

    client: httpx.AsyncClient
    max_tokens: int
    model: str | None = None
    """The model's name in requests; None if the server has only one."""
    prepare: Callable[[dict[str, object]], Awaitable[dict[str, object]]] | None = None
    """Changes a body before it is sent; the measured time includes this."""
    count_blocks: bool = True
    """True to ask /status for blocks, which only our servers have."""
    seeded: bool = True
    """True to send seeds. vLLM 0.32's CPU build ends when it computes the prompt of a seeded request in pieces."""
    answers_at: str = PATH
    """The route whose answers can have token ids."""
    usage_of_each: bool = False
    """True for a server that tells the usage of each choice, not of all of them."""

    async def tokens_of(self, text: str) -> list[int]:
        response = await self.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
        response.raise_for_status()
        return msgspec.json.decode(response.content, type=_Tokens).tokens

    async def group(self, prompt: list[int], n: int, *, seed: int) -> Timing:
        """Times one request with n choices."""
        talk, blocks_used = await self._follow(prompt, n, seed=seed)
        return timing_of([talk], tokens=n * self.max_tokens, blocks_used=blocks_used)

    async def groups(self, prompts: Sequence[list[int]], n: int, *, seed: int) -> Timing:
        """Times a request with n choices for each prompt, all sent at once."""
        async with asyncio.TaskGroup() as tasks:
            sent = [tasks.create_task(self._follow(p, n, seed=seed + i * n)) for i, p in enumerate(prompts)]
        results = [task.result() for task in sent]
        talks = [talk for talk, _ in results]
        tokens = len(prompts) * n * self.max_tokens
        return timing_of(talks, tokens=tokens, blocks_used=max(blocks for _, blocks in results))

    async def separate(self, prompt: list[int], n: int, *, seed: int) -> Timing:
        """Times the choices of a group as n requests sent at once."""
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
        answer = msgspec.json.decode(response.content, type=_Answer)
        tokens = answer.choices[0].token_ids if answer.choices else answer.tokens
        if len(tokens) != self.max_tokens:
            raise EngineError(f"the server was asked for {self.max_tokens} tokens, but wrote {len(tokens)}")
        return tokens

    async def _follow(self, prompt: list[int], n: int, *, seed: int) -> tuple[Conversation, int]:
        talk, blocks_used = Conversation(n), 0
        body = self._body(prompt, n, seed=seed)
        if self.prepare is not None:
            body = await self.prepare(body)
        async with asyncio.timeout(TIMEOUT_S):
            if self.count_blocks:
                blocks_used = await self._follow_counting(talk, body)
            else:
                await follow(self.client, PATH, body, talk.feed)
        counted = self.max_tokens if self.usage_of_each else n * self.max_tokens
        if talk.usage is None or talk.usage.completion_tokens != counted:
            raise EngineError(f"the server was asked for {counted} tokens, but counts {talk.usage}")
        return talk, blocks_used

    def _body(self, prompt: list[int], n: int, *, seed: int) -> dict[str, object]:
        body: dict[str, object] = {
            "prompt": prompt,
            "n": n,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.seeded:
            body["seed"] = seed
        if self.model is not None:
            body["model"] = self.model
        return body

    async def _follow_counting(self, talk: Conversation, body: Mapping[str, object]) -> int:
        """Reads the answer, and returns the blocks in use when every choice had its first token."""
        begun = asyncio.Event()

        def take(line: str) -> None:
            talk.feed(line)
            if not begun.is_set() and (talk.done or last_first_s(talk) is not None):
                begun.set()

        async with asyncio.TaskGroup() as tasks:
            counting = tasks.create_task(self._blocks_used(begun))
            await follow(self.client, PATH, body, take)
            begun.set()
        return counting.result()

    async def _blocks_used(self, begun: asyncio.Event) -> int:
        await begun.wait()
        status = await self.client.get("/status")
        return sum(worker["blocks_used"] for worker in status.json()["workers"])


def last_first_s(talk: Conversation) -> float | None:
    """Returns the seconds until every answer had text; None while one has none."""
    times = [answer.first_s for answer in talk.answers if answer.first_s is not None]
    return max(times) if times and len(times) == len(talk.answers) else None


def timing_of(talks: list[Conversation], *, tokens: int, blocks_used: int) -> Timing:
    return Timing(
        first_s=min(talk.first_s or 0.0 for talk in talks),
        last_first_s=max(last_first_s(talk) or 0.0 for talk in talks),
        total_s=max(talk.total_s or 0.0 for talk in talks),
        tokens=tokens,
        blocks_used=blocks_used,
    )
