"""What goes wrong on the decode side: the client gets a clear error at once, and prefill keeps nothing for the dead."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from motet.engines.base import Worker
from motet.errors import EngineDiedError
from motet.routing.bypass import BypassRules
from motet.routing.disaggregate import Disaggregated
from motet.routing.fleet import Fleet
from motet.routing.routed import Routed
from motet.types import GenerateRequest
from tests.engines.native.drive import gb_of, group, prompt_of
from tests.fault.worker_pair import WorkerPair, answer, kill, undisturbed, until, worker_pair

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@asynccontextmanager
async def cell(folder: Path, **decode: object) -> AsyncIterator[tuple[WorkerPair, Disaggregated]]:
    """Two workers behind what orchestrates them, as in a server."""
    async with worker_pair(folder, decode=decode) as pair:
        await pair.meet()
        routed = Routed(Fleet([Worker("prefill-0", pair.p, ""), Worker("decode-0", pair.d, "")]))
        yield pair, Disaggregated(routed, routed, BypassRules(bypass_tokens=0))


def request(name: str, *, length: int = 300, max_tokens: int = 30) -> GenerateRequest:
    return group(name, prompt_of(length, len(name)), n=4, seed=5, max_tokens=max_tokens)


async def test_decode_killed_after_the_pull(folder: Path) -> None:
    async with cell(folder) as (pair, engine):
        stream = engine.generate(request("g", max_tokens=200))
        await anext(stream)
        await kill(pair.d)
        with pytest.raises(EngineDiedError, match="ended with exit code"):
            async for _ in stream:
                pass
        await pair.check_prefill()


async def test_decode_killed_before_the_pull(folder: Path) -> None:
    memory = gb_of(66)  # room for one prompt of the greatest length
    async with cell(folder, kv_cache_gb=memory) as (pair, engine):
        first = engine.generate(request("first", length=450, max_tokens=60))
        await anext(first)
        second = engine.generate(request("second"))
        await until(pair.p, lambda stats: stats.leases == 1)
        await until(pair.d, lambda stats: stats.groups_waiting == 1)
        await kill(pair.d)
        for stream in (first, second):
            with pytest.raises(EngineDiedError):
                async for _ in stream:
                    pass
        await pair.check_prefill()


async def test_a_dead_prefill_is_done_without(folder: Path) -> None:
    async with cell(folder) as (pair, engine):
        before, after = request("before"), request("after")
        assert await answer(engine, before) == undisturbed(folder, before)
        await kill(pair.p)
        assert await answer(engine, after) == undisturbed(folder, after)
        assert engine.bypasses["prefill-down"] == 1
        await pair.check_decode()
