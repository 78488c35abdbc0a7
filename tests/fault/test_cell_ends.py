"""The last engine that decodes is lost and not restarted: clients get a clear error at once, and the server ends."""

import asyncio
from pathlib import Path

import pytest

from motet.deploy.server import Outcome
from motet.settings.server_config import RoutingConfig
from tests.error_response import assert_error
from tests.fault.answers import Reader, lines_of, read
from tests.fault.fault_requests import CHAT, COMPLETIONS, STREAMED, chat, completion
from tests.fault.faults import AllGenerated, kill, paused
from tests.fault.running_cell import TWO_DECODE_ENGINES, RunningCell
from tests.forked import ForkingProcess

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_a_server_ends_when_no_engine_is_restarted(folder: Path, forking: ForkingProcess) -> None:
    never = RoutingConfig(engine_restarts=0)
    async with RunningCell(folder, cell=TWO_DECODE_ENGINES, routing=never, spawn=forking.spawn, max_num_seqs=8) as cell:
        cell.faults.arm(AllGenerated(2, 20), cell.on_all(kill))
        with paused(*cell.decoding):
            started = [asyncio.create_task(streamed(cell, f"started {i}")) for i in range(2)]
            await cell.until_submitted(2)
            queued = asyncio.create_task(cell.http.post(COMPLETIONS, json=completion("queued", STREAMED, n=8)))
            await cell.until_submitted(2, queued=1)
        for reader in await asyncio.gather(*started):
            assert reader.failure is not None and reader.failure.code == "engine_died"
            assert reader.done
        refused = await queued
        assert_error(refused, status=503, code="no_worker")
        assert (await cell.http.get("/health")).status_code == 503
        cell.signals.receive()  # otherwise it would run for some time, so that load balancers see its state
        assert await cell.outcome() is Outcome.ENGINE_DIED


async def streamed(cell: RunningCell, name: str) -> Reader:
    async with cell.http.stream("POST", CHAT, json=chat(name, STREAMED, n=8, max_tokens=200)) as response:
        return await read(lines_of(response), Reader())
