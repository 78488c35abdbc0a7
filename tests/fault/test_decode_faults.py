"""The decode engine fails: the client gets a clear error at once, and the prefill engine holds nothing for it."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from motet.engine import Worker
from motet.engine_orders import Hold
from motet.engines.native.spawn import Spawn
from motet.errors import EngineDiedError
from motet.routing.router import Router
from motet.routing.workers.fleet import Fleet
from motet.settings.server_config import CellConfig, RoutingConfig
from motet.types import GenerateRequest
from tests.engines.native.drive import gb_of, group, prompt_of
from tests.fault.worker_pair import WorkerPair, answer, kill, send, stop, undisturbed, until, worker_pair
from tests.forked import ForkingProcess

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@asynccontextmanager
async def cell(
    folder: Path, spawn: Spawn, both: dict[str, object] | None = None, **decode: object
) -> AsyncIterator[tuple[WorkerPair, Router]]:
    """Starts two workers with a router, as in a server. A group that loses its worker ends, since no moves are
    allowed."""
    both = {"max_model_len": 1016, **(both or {})}
    async with worker_pair(folder, spawn, prefill=both, decode=both | decode) as pair:
        await pair.meet()
        fleet = Fleet([Worker("prefill-0", pair.p, ""), Worker("decode-0", pair.d, "")])
        routing = RoutingConfig(migration_limit=0, migration_wait_s=0.0)
        yield pair, Router(fleet, routing, cell=CellConfig(bypass_tokens=0))


def request(name: str, *, length: int = 300, n: int = 4, max_tokens: int = 30) -> GenerateRequest:
    return group(name, prompt_of(length, len(name)), n=n, seed=5, max_tokens=max_tokens)


@pytest.mark.parametrize("backend", ["shared-memory", pytest.param("nixl", marks=pytest.mark.long)], indirect=True)
async def test_decode_is_killed_after_one_pull_and_before_another(
    folder: Path, forking: ForkingProcess, backend: dict[str, object]
) -> None:
    memory = gb_of(128)  # enough for either group, and too little for the long prompt next to the short one
    async with cell(folder, forking.spawn, backend, kv_cache_gb=memory) as (pair, engine):
        stop(pair.d)  # otherwise it could finish the first group before it gets the second
        pulled = engine.placed().generate(request("pulled", length=80, n=1, max_tokens=900))
        # `placed()`: it waits on the worker, not in the router
        waiting = engine.placed().generate(request("waiting", length=950))
        await until(pair.p, lambda stats: stats.prefills == 2)
        send(pair.d, signal.SIGCONT)
        await anext(pulled)
        await pair.d.send(Hold(True))  # otherwise it could end the first group before it is killed
        now = await pair.d.stats(check=True)
        assert (now.groups_running, now.groups_waiting, now.transfers) == (1, 1, 1)
        await until(pair.p, lambda stats: stats.leases == 1)
        await kill(pair.d)
        for stream in (pulled, waiting):
            with pytest.raises(EngineDiedError, match="was ended by SIGKILL"):
                async for _ in stream:
                    pass
        await pair.check_prefill()


async def test_decode_works_without_a_dead_prefill_engine(folder: Path, forking: ForkingProcess) -> None:
    async with cell(folder, forking.spawn) as (pair, engine):
        before, after = request("before"), request("after")
        assert await answer(engine, before) == undisturbed(folder, before)
        await kill(pair.p)
        assert await answer(engine, after) == undisturbed(folder, after)
        assert engine.counts.bypasses["prefill-down"] == 1
        await pair.check_decode()
