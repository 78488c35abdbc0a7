"""A cell sleeps and wakes, with running streams and killed engines: its memory is released, and every answer is bit for
bit the same as without the sleep."""

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

from motet.settings.server_config import RoutingConfig
from tests.error_response import assert_error
from tests.fault.answers import Answer, fetch_answer
from tests.fault.fault_requests import CHAT, COMPLETIONS, ENDLESS, ENDLESS_ENGINE, STREAMED, chat, completion
from tests.fault.faults import kill
from tests.fault.running_cell import MANY_RESTARTS, RunningCell
from tests.forked import USED_KV, ForkingProcess
from tests.patience import PATIENCE_S
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.usefixtures("used_kv")]

BODIES = [(CHAT, chat("a chat", n=3)), (COMPLETIONS, completion("texts", n=2, prompts=2))]
LONG = chat("under way", STREAMED, n=4, max_tokens=1000)
"""Runs long enough for a sleep in its middle."""
LONG_TEXTS: dict[str, Any] = {"max_model_len": 2048}
RL: dict[str, object] = {"rl": True}
KV_GB = 0.1
WORKERS = ("prefill-0", "decode-0", "decode-1")


@pytest.fixture
def used_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets engines hold their complete KV cache, so that its release can be measured."""
    monkeypatch.setenv(USED_KV, "1")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with other weights."""
    return save_tiny_tokenizer(save_tiny_model("llama", tmp_path_factory.mktemp("other"), seed=4))


async def answers_of(cell: RunningCell) -> list[Answer]:
    return list(await asyncio.gather(*(fetch_answer(cell.http, route, body) for route, body in BODIES)))


async def order(cell: RunningCell, path: str, **query: str | int | bool) -> Any:
    return (await cell.http.post(path, params=query)).raise_for_status().json()


def resident(cell: RunningCell, worker: str) -> int:
    """Returns the size in bytes of an engine's resident memory, without shared memory."""
    pid = cell.engine(worker).info.pid
    assert pid is not None
    memory = psutil.Process(pid).memory_info()
    return int(memory.rss - memory.shared)


async def fetched(cell: RunningCell) -> int:
    """Returns the number of prompts whose KV was transferred from the prefill engine."""
    return sum([(await cell.stats(worker)).transfers for worker in ("decode-0", "decode-1")])


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.long), 2])
async def test_kept_streams_continue_and_kv_moves_between_engines_after_the_sleep(
    level: int, long_folder: Path, forking: ForkingProcess
) -> None:
    async with RunningCell(long_folder, spawn=forking.spawn, server=RL, kv_cache_gb=KV_GB, **LONG_TEXTS) as cell:
        before = {worker: resident(cell, worker) for worker in WORKERS}
        complete, expected = await fetch_answer(cell.http, CHAT, LONG), await answers_of(cell)
        for _ in range(2):
            async with cell.started_stream(CHAT, LONG) as stream:
                assert await order(cell, "/sleep", level=level, mode="keep") == {"status": "sleeping", "level": level}
                for worker in WORKERS:
                    assert before[worker] - resident(cell, worker) > 0.6 * KV_GB * 2**30
                assert (await cell.http.get("/is_sleeping")).json() == {"is_sleeping": True}
                queued = asyncio.create_task(answers_of(cell))
                await cell.until_submitted(1, queued=3)
                assert await order(cell, "/wake_up", tags="weights") == {"status": "sleeping", "tags": ["weights"]}
                assert not stream.has_ended
                transferred = await fetched(cell)
                assert await order(cell, "/wake_up", tags="kv_cache") == {"status": "awake", "tags": ["kv_cache"]}
                assert await stream.rest() == complete
                assert await queued == expected
                assert await fetched(cell) > transferred
        assert (await cell.http.get("/is_sleeping")).json() == {"is_sleeping": False}
        assert sum((await cell.stats("decode-0")).transfer_failures.values()) == 0
        await cell.check_nothing_left()


async def test_weights_of_an_update_are_restored_and_weights_sent_during_the_sleep_stay(
    folder: Path, other: Path, forking: ForkingProcess
) -> None:
    async with RunningCell(folder, spawn=forking.spawn, server=RL) as cell:
        old = await answers_of(cell)
        await order(cell, "/sleep", level=2)
        update = {"weight_dir": str(other)}
        assert (await cell.http.post("/update_weights", json=update)).json()["weight_version"] == "1"
        await order(cell, "/wake_up")
        new = await answers_of(cell)
        assert new != old
        await order(cell, "/sleep", level=2)
        await order(cell, "/wake_up")
        assert await answers_of(cell) == new
        back = {"weight_dir": str(folder)}
        await order(cell, "/sleep", level=1)
        assert (await cell.http.post("/update_weights", json=back)).json()["weight_version"] == "2"
        await order(cell, "/wake_up")
        assert await answers_of(cell) == old
        text = (await cell.http.get("/metrics")).text
        assert 'motet:weight_version_info{model_name="tiny",role="decode",version="2",worker="decode-1"} 1.0' in text
        assert 'motet:weight_updates_total{model_name="tiny",outcome="applied"} 2.0' in text
        await cell.check_nothing_left()


@pytest.mark.parametrize("level", [1, 2])
async def test_an_engine_that_dies_asleep_sleeps_again_and_the_cell_wakes_up_complete(
    level: int, folder: Path, other: Path, forking: ForkingProcess
) -> None:
    async with RunningCell(folder, spawn=forking.spawn, server=RL, kv_cache_gb=KV_GB) as cell:
        await cell.http.post("/update_weights", json={"weight_dir": str(other)})
        expected = await answers_of(cell)
        awake = resident(cell, "decode-0")
        await order(cell, "/sleep", level=level)
        for worker in ("prefill-0", "decode-0"):
            killed = cell.engine(worker)
            kill(killed)
            await killed.died.wait()
            await cell.restored()
            assert awake - resident(cell, worker) > 0.6 * KV_GB * 2**30
        assert (await cell.http.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert await order(cell, "/wake_up") == {"status": "awake", "tags": None}
        assert await answers_of(cell) == expected
        await cell.check_nothing_left()


async def test_requests_wait_while_engines_sleep_and_then_are_refused(
    long_folder: Path, forking: ForkingProcess
) -> None:
    routing = RoutingConfig(engine_restarts=50, migration_wait_s=PATIENCE_S, queue_timeout_s=0.3)
    async with RunningCell(long_folder, spawn=forking.spawn, server=RL, routing=routing, **ENDLESS_ENGINE) as cell:
        async with cell.started_stream(CHAT, LONG | {"max_tokens": ENDLESS}) as stream:
            await order(cell, "/sleep", level=1)
            cut = await stream.rest()
        assert {choice.finish_reason for choice in cut.choices.values()} == {"abort"}
        route, body = BODIES[0]
        refused = await cell.http.post(route, json=body)
        assert_error(refused, status=503, code="overloaded")
        resumed = await cell.http.post("/resume")
        assert_error(resumed, status=400, code="asleep")
        await order(cell, "/wake_up")
        assert (await cell.http.post(route, json=body)).status_code == 200
        await cell.check_nothing_left()


@pytest.mark.long
async def test_a_server_that_is_stopped_asleep_lets_its_answers_end(long_folder: Path, forking: ForkingProcess) -> None:
    async with RunningCell(long_folder, spawn=forking.spawn, server=RL, **LONG_TEXTS) as cell:
        complete = await fetch_answer(cell.http, CHAT, LONG)
        async with cell.started_stream(CHAT, LONG) as stream:
            await order(cell, "/sleep", level=2, mode="keep")
            cell.signals.receive()
            assert await stream.rest() == complete


@pytest.mark.long
async def test_an_emptied_prefix_cache_is_recomputed_on_all_engines_and_the_router_knows(
    long_folder: Path, forking: ForkingProcess
) -> None:
    async with RunningCell(long_folder, spawn=forking.spawn, server=RL, routing=MANY_RESTARTS, **LONG_TEXTS) as cell:
        complete, expected = await fetch_answer(cell.http, CHAT, LONG), await answers_of(cell)
        async with cell.started_stream(CHAT, LONG) as stream:
            assert await order(cell, "/reset_prefix_cache") == {"success": True}
            assert await order(cell, "/reset_prefix_cache", reset_running_requests=True) == {"success": True}
            assert await stream.rest() == complete
        await order(cell, "/reset_prefix_cache")
        assert [(await cell.stats(worker)).blocks_cached for worker in WORKERS] == [0, 0, 0]
        assert [cell.fleet.cached_blocks.blocks(worker) for worker in WORKERS] == [0, 0, 0]
        before = (await cell.stats("prefill-0")).prefill_tokens
        assert await answers_of(cell) == expected
        assert (await cell.stats("prefill-0")).prefill_tokens > before
        await cell.check_nothing_left()
