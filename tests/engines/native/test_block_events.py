"""Followers of a real engine know exactly the blocks in its prefix cache."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from motet.block_names import block_names
from motet.engine_orders import ForgetPrefixes, Hold, Sleep, Wake
from motet.engines.native.client import NativeEngine
from motet.kv_events.changes import BlockChange
from motet.kv_events.follower import BlockSource, follow_blocks
from motet.kv_events.publisher import BlockPublisher, PublisherOptions
from motet.types import GenerateRequest
from tests.engines.native.drive import gb_of, group, prompt_of
from tests.forked import ForkingProcess
from tests.kv_events.names import apply_to
from tests.tiny_engine import BLOCK_SIZE, engine_config

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


class Follower:
    def __init__(self) -> None:
        self.names: set[bytes] = set()
        self.changed = asyncio.Event()

    def __call__(self, changes: Sequence[BlockChange]) -> None:
        apply_to(self.names, changes)
        self.changed.set()

    def cached_tokens(self, request: GenerateRequest) -> int:
        """Returns the number of cached tokens as a router computes it."""
        names = block_names(request.prompt[:-1], BLOCK_SIZE, salt=request.cache_salt)
        unknown = next((i for i, name in enumerate(names) if name not in self.names), len(names))
        return unknown * BLOCK_SIZE

    async def until_as(self, other: "Follower") -> None:
        while self.names != other.names:
            await self.changed_again()

    async def changed_again(self) -> None:
        self.changed.clear()
        await self.changed.wait()


async def serve(engine: NativeEngine, request: GenerateRequest) -> int:
    """Runs a request, and returns the number of its prompt tokens that were cached."""
    found = [delta.prompt.cached_tokens async for delta in engine.generate(request) if delta.prompt]
    return found[0]


async def test_followers_of_an_engine_know_what_its_prefix_cache_finds(
    tiny: Callable[[str], Path], forking: ForkingProcess
) -> None:
    """Prompts of 5 to 12 blocks evict each other from 40 blocks."""
    config = engine_config(tiny("llama"), kv_cache_gb=gb_of(40), max_model_len=200)
    engine = await NativeEngine.start(config, spawn=forking.spawn)
    publisher = BlockPublisher(PublisherOptions(block_size=BLOCK_SIZE, messages_kept=5))
    early, late, direct = Follower(), Follower(), Follower()
    engine.listen_to_blocks(publisher.publish)
    engine.listen_to_blocks(direct)
    source = BlockSource.of_motet(publisher.endpoint)
    tasks = [asyncio.create_task(follow_blocks(source, early))]
    shared = prompt_of(3 * BLOCK_SIZE)
    requests = [
        group(f"g{i}", (*shared, *prompt_of(16 + 7 * i, i)), cache_salt="pepper" if i % 3 == 0 else "", max_tokens=3)
        for i in range(9)
    ]
    try:
        for request in requests:
            await serve(engine, request)
        await early.until_as(direct)
        assert 0 < sum(early.cached_tokens(request) > 3 * BLOCK_SIZE for request in requests) < len(requests)
        tasks.append(asyncio.create_task(follow_blocks(source, late)))
        await late.until_as(direct)
        for number, request in enumerate(reversed(requests)):
            await late.until_as(direct)
            known = late.cached_tokens(request)
            again = group(f"again{number}", request.prompt, cache_salt=request.cache_salt, max_tokens=1)
            assert await serve(engine, again) == known
        with pytest.raises(RuntimeError, match="stored blocks already"):
            engine.listen_to_blocks(late)
    finally:
        await engine.close()
    for follower in (early, late):
        while follower.names:  # after the end of an engine, its follower knows no blocks
            await follower.changed_again()
    for task in tasks:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await publisher.close()


async def test_followers_learn_that_a_prefix_cache_was_emptied(
    tiny: Callable[[str], Path], forking: ForkingProcess
) -> None:
    engine = await NativeEngine.start(engine_config(tiny("llama")), spawn=forking.spawn)
    follower = Follower()
    engine.listen_to_blocks(follower)
    try:
        request = group("g", prompt_of(60))
        assert await serve(engine, request) == 0
        assert follower.cached_tokens(request) == await serve(engine, request) == 56
        await engine.send(ForgetPrefixes(recompute=False))
        while follower.names:
            await follower.changed_again()
        assert await serve(engine, request) == 0
        await engine.send(Hold(True))
        await engine.send(Sleep(weights=False))
        while follower.names:
            await follower.changed_again()
        await engine.send(Wake())
        await engine.send(Hold(False))
        assert await serve(engine, request) == 0
    finally:
        await engine.close()
