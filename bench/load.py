"""Sends timed requests to a server: one group of n, or n separate requests at once."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median

import httpx
import msgspec

from motet.cli.conversation import Conversation
from motet.errors import EngineError

TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Timing:
    """What one request, or n at once, took."""

    first_s: float
    """Until the first choice had a token."""
    last_first_s: float
    """Until every choice had one."""
    total_s: float
    tokens: int
    blocks_used: int = 0
    """KV blocks held by groups when every choice had its first token."""

    @property
    def decode_tokens_per_s(self) -> float:
        """All tokens over the time after the last first token."""
        return self.tokens / (self.total_s - self.last_first_s)


def middle(timings: list[Timing]) -> Timing:
    """The median of every figure by itself."""
    return Timing(
        first_s=median(t.first_s for t in timings),
        last_first_s=median(t.last_first_s for t in timings),
        total_s=median(t.total_s for t in timings),
        tokens=timings[0].tokens,
        blocks_used=max(t.blocks_used for t in timings),
    )


class _Tokens(msgspec.Struct):
    tokens: list[int]


@dataclass(frozen=True)
class Load:
    """How long the answers are, and where they come from."""

    client: httpx.AsyncClient
    max_tokens: int
    prepare: Callable[[dict[str, object]], Awaitable[dict[str, object]]] | None = None
    """What has to happen to a body before it can be sent, inside the time that is measured."""
    count_blocks: bool = True
    """Ask /status, which only our servers have."""

    async def tokens_of(self, text: str) -> list[int]:
        response = await self.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
        response.raise_for_status()
        return msgspec.json.decode(response.content, type=_Tokens).tokens

    async def group(self, prompt: list[int], n: int, *, seed: int) -> Timing:
        """One request with n choices."""
        talk, blocks_used = await self._follow(prompt, n, seed=seed)
        return timing_of([talk], tokens=n * self.max_tokens, blocks_used=blocks_used)

    async def separate(self, prompt: list[int], n: int, *, seed: int) -> Timing:
        """The same choices as n requests sent at once."""
        async with asyncio.TaskGroup() as tasks:
            sent = [tasks.create_task(self._follow(prompt, 1, seed=seed + i)) for i in range(n)]
        results = [task.result() for task in sent]
        talks = [talk for talk, _ in results]
        return timing_of(talks, tokens=n * self.max_tokens, blocks_used=max(blocks for _, blocks in results))

    async def _follow(self, prompt: list[int], n: int, *, seed: int) -> tuple[Conversation, int]:
        body: dict[str, object] = {
            "prompt": prompt,
            "n": n,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        talk, blocks_used = Conversation(n), 0
        if self.prepare is not None:
            body = await self.prepare(body)
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise EngineError(f"{response.status_code}: {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                talk.feed(line)
                if self.count_blocks and not blocks_used and talk.last_first_s is not None:
                    blocks_used = await self._blocks_used()
        if talk.usage is None or talk.usage.completion_tokens != n * self.max_tokens:
            raise EngineError(f"{n * self.max_tokens} tokens were asked for, the server counts {talk.usage}")
        return talk, blocks_used

    async def _blocks_used(self) -> int:
        status = await self.client.get("/status")
        return sum(worker["blocks_used"] for worker in status.json()["workers"])


def timing_of(talks: list[Conversation], *, tokens: int, blocks_used: int) -> Timing:
    return Timing(
        first_s=min(talk.first_s or 0.0 for talk in talks),
        last_first_s=max(talk.last_first_s or 0.0 for talk in talks),
        total_s=max(talk.total_s or 0.0 for talk in talks),
        tokens=tokens,
        blocks_used=blocks_used,
    )
