"""A decode server and the prefill servers to which it sends requests."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from bench.servers.ports import free_port
from motet.deploy.server import Outcome
from motet.engine import WorkerState
from motet.ids import ModelName
from motet.settings.server_config import CellConfig
from motet.testing.fake_engine import FakeLeases
from motet.types import GenerateRequest, Role
from tests.deploy.dying import Starter
from tests.deploy.running import Running, is_complete

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def cell_with(*urls: str) -> CellConfig:
    return CellConfig(prefill_urls=urls, bypass_tokens=0)


async def prefill_of(decode: Running) -> dict[str, object]:
    """Returns the first prefill server, as the decode server reports it."""
    workers = (await decode.http.get("/status")).json()["workers"]
    return next(worker for worker in workers if worker["id"] == "prefill-0")


async def until_prefill(decode: Running, state: WorkerState) -> None:
    fleet = decode.cell.router.fleet
    while [member.state for member in fleet.members if member.id == "prefill-0"] != [state]:
        await fleet.changes.wait()


async def test_a_decode_server_connects_to_its_prefill_server_which_prefills_its_prompts(folder: Path) -> None:
    leases = FakeLeases()
    async with Running(folder, role=Role.PREFILL, starter=Starter(leases=leases)) as prefill:
        url = str(prefill.http.base_url)
        async with Running(folder, role=Role.DECODE, cell=cell_with(url), starter=Starter(leases=leases)) as decode:
            await decode.engine.has_connected.wait()
            assert decode.engine.connected == [prefill.engine.info.transfer]
            decode.engine.let_run()
            assert is_complete((await decode.chat()).text)
            assert (len(prefill.engine.prefills), decode.engine.record.pulls) == (1, 1)
            assert leases.held == {}
            decode.signals.receive()
            assert await decode.outcome() is Outcome.STOPPED
        assert (await prefill.http.get("/health")).status_code == 200


async def test_a_decode_server_lists_its_prefill_servers_by_their_urls_each_once(folder: Path) -> None:
    cell = cell_with("http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:1/v1/")
    async with Running(folder, role=Role.DECODE, cell=cell) as decode:
        workers = (await decode.http.get("/status")).json()["workers"]
        assert [(worker["id"], worker["role"], worker["address"]) for worker in workers] == [
            ("decode-0", "decode", decode.http.base_url.netloc.decode()),
            ("prefill-0", "prefill", "http://127.0.0.1:1"),
            ("prefill-1", "prefill", "http://127.0.0.1:2"),
        ]


async def test_without_its_prefill_server_a_decode_server_computes_prompts_itself(folder: Path) -> None:
    async with Running(folder, role=Role.DECODE, cell=cell_with("http://127.0.0.1:1")) as decode:
        decode.engine.let_run()
        assert is_complete((await decode.chat()).text)
        assert decode.engine.record.pulls == 0
        assert (await decode.http.get("/status")).json()["totals"]["bypasses"] == 1


async def test_a_prefill_server_takes_requests_with_its_key_and_refuses_others(folder: Path) -> None:
    leases = FakeLeases()
    prefill = Running(folder, role=Role.PREFILL, starter=Starter(leases=leases), worker_key="secret")
    async with prefill:
        url = str(prefill.http.base_url)
        async with Running(
            folder, role=Role.DECODE, cell=cell_with(url), worker_key="secret", starter=Starter(leases=leases)
        ) as decode:
            decode.engine.let_run()
            assert is_complete((await decode.chat()).text)
            assert decode.engine.record.pulls == 1
        async with Running(folder, role=Role.DECODE, cell=cell_with(url), worker_key="another") as decode:
            shown = await prefill_of(decode)
            assert shown["state"] == "dead"
            assert "answered 401" in str(shown["note"])
            assert "--worker-key" in str(shown["note"])
            decode.engine.let_run()
            assert is_complete((await decode.chat()).text)
    assert len(prefill.engine.prefills) == 1


async def test_a_prefill_server_of_another_model_gets_no_requests_and_the_reason_is_shown(folder: Path) -> None:
    async with Running(folder, role=Role.PREFILL) as prefill:
        prefill.engine.info = replace(prefill.engine.info, model=ModelName("large"))
        url = str(prefill.http.base_url)
        async with Running(folder, role=Role.DECODE, cell=cell_with(url)) as decode:
            shown = await prefill_of(decode)
            assert (shown["state"], shown["role"]) == ("dead", "prefill")
            assert "has the model large, and this server fake" in str(shown["note"])
            decode.engine.let_run()
            assert is_complete((await decode.chat()).text)
    assert prefill.engine.prefills == []


async def test_a_restarted_prefill_server_is_connected_again(folder: Path) -> None:
    leases, port = FakeLeases(), free_port()
    first = Running(folder, role=Role.PREFILL, starter=Starter(leases=leases), port=port)
    async with first:
        cell = cell_with(str(first.http.base_url))
        decode = Running(folder, role=Role.DECODE, cell=cell, starter=Starter(leases=leases))
        await decode.__aenter__()
        decode.engine.let_run()
        assert is_complete((await decode.chat()).text)
    try:
        await until_prefill(decode, WorkerState.DEAD)
        assert is_complete((await decode.chat()).text)
        assert decode.engine.record.pulls == 1
        again = Starter(leases=leases)
        again.configs.extend(first.starter.configs)  # so its engine gets another id
        async with Running(folder, role=Role.PREFILL, starter=again, port=port) as second:
            await until_prefill(decode, WorkerState.READY)
            assert is_complete((await decode.chat()).text)
            assert [address.engine_id for address in decode.engine.connected] == ["engine 1", "engine 2"]
            assert (len(second.engine.prefills), decode.engine.record.pulls) == (1, 2)
    finally:
        await decode.__aexit__(None, None, None)


async def test_a_client_that_leaves_while_its_prompt_is_prefilled_leaves_nothing_there(folder: Path) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def prefill_without_end(_: GenerateRequest) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with Running(folder, role=Role.PREFILL) as prefill:
        prefill.engine.during_prefill = prefill_without_end
        async with Running(folder, role=Role.DECODE, cell=cell_with(str(prefill.http.base_url))) as decode:
            chat = asyncio.ensure_future(decode.chat())
            await started.wait()
            chat.cancel()
            await ended.wait()
            await asyncio.wait([chat])
            workers = (await prefill.http.get("/status")).json()["workers"]
            assert [worker["leases"] for worker in workers] == [0]
            prefill.engine.check()
            assert decode.engine.requests == []


async def test_a_decode_server_ends_with_its_engine_even_if_it_has_prefill_servers(folder: Path) -> None:
    async with Running(folder, role=Role.PREFILL) as prefill:
        async with Running(folder, role=Role.DECODE, cell=cell_with(str(prefill.http.base_url))) as decode:
            decode.engine.die()
            assert await decode.outcome() is Outcome.ENGINE_DIED
        assert not prefill.ended.done()
