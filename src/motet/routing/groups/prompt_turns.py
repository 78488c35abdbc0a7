"""Makes groups with the same prompt that arrive together take turns, if prefill and decode are separate.

The first group has the prompt prefilled. Once a decode worker has the prompt, the next group chooses its worker. If it
chooses the same worker, it shares the prompt without prefill or transfer, and so do the groups after it. If that worker
has no capacity, another decode worker gets the prompt by one more transfer, of blocks that the prefill worker still
has. If prefill fails, all waiting groups continue together, so a worker that hangs delays each of them only once.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from motet.ids import ModelName
from motet.types import GenerateRequest

PromptKey = tuple[ModelName, str, str, tuple[int, ...]]
"""Model, weights, salt and tokens."""


@dataclass
class PromptTurn:
    """The turns of the groups of one prompt."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    groups: int = 0
    """Number of groups that have their turn, or wait for it."""
    failed: bool = False
    """True if the prefill of one group failed. From then on no group waits for another one."""


class PromptTurns:
    """The turns by prompt, for prompts that have a group now."""

    def __init__(self) -> None:
        self._turns: dict[PromptKey, PromptTurn] = {}

    @asynccontextmanager
    async def turn(self, request: GenerateRequest) -> AsyncIterator[PromptTurn]:
        """Waits until it is the group's turn, which lasts as long as the context."""
        key = request.model, request.model_digest, request.cache_salt, request.prompt
        turn = self._turns.setdefault(key, PromptTurn())
        turn.groups += 1
        try:
            async with turn.lock:
                if not turn.failed:
                    yield turn
                    return
            yield turn
        finally:
            turn.groups -= 1
            if not turn.groups:
                del self._turns[key]

    def check(self) -> None:
        """Raises AssertionError if a group has its turn or waits for it."""
        if self._turns:
            raise AssertionError(f"groups of {len(self._turns)} prompts wait for their turn")
