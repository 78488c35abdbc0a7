"""Groups with one prompt that come at once while prefill and decode are apart: they ask for prefill in turn.

The first one gets the prompt prefilled. Once a decode worker has it, the next one decides: if it goes to that worker it
shares the prompt there, without prefill or transfer, as do all that follow it; if there is no room, another decode
worker gets the prompt by one more transfer, of blocks that the prefill worker still has.
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
class _Queue:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    groups: int = 0
    """Number of groups that have their turn, or wait for it."""


class PromptTurns:
    def __init__(self) -> None:
        self._queues: dict[PromptKey, _Queue] = {}

    @asynccontextmanager
    async def turn(self, request: GenerateRequest) -> AsyncIterator[None]:
        """Waits until it is the group's turn, which lasts as long as the context."""
        key = request.model, request.model_digest, request.cache_salt, request.prompt
        queue = self._queues.setdefault(key, _Queue())
        queue.groups += 1
        try:
            async with queue.lock:
                yield
        finally:
            queue.groups -= 1
            if not queue.groups:
                del self._queues[key]

    def check(self) -> None:
        """Raises AssertionError if a group has its turn or waits for it."""
        if self._queues:
            raise AssertionError(f"groups of {len(self._queues)} prompts wait for their turn")
