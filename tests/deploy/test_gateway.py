"""A gateway with servers as workers: which worker answers, and answers that continue when their worker is lost or
leaves."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from bench.servers.ports import free_port
from motet.deploy.server import Outcome, make_gateway
from motet.engine import WorkerState
from motet.engines.http import server_client
from motet.settings.server_config import RoutingConfig
from motet.testing.fake_engine import FakeLeases
from motet.types import Role
from tests.deploy.dying import Starter
from tests.deploy.gateways import ADMIN, RunningGateway, address, failure_without_workers, id_of, plan_of
from tests.deploy.running import EXPECTED, Running, texts
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_a_gateway_answers_through_its_workers(folder: Path) -> None:
    async with Running(folder) as one, Running(folder) as other, RunningGateway(one, other) as gateway:
        for server in (one, other):
            server.engine.let_run()
        assert texts((await gateway.chat()).text) == EXPECTED
        assert len(one.engine.requests) + len(other.engine.requests) == 1
        workers = (await gateway.http.get("/status")).json()["workers"]
        assert [(worker["id"], worker["state"], worker["address"]) for worker in workers] == [
            (id_of(server), "ready", address(server)) for server in (one, other)
        ]
        gateway.signals.receive()
        assert await gateway.outcome() is Outcome.STOPPED
        assert not one.ended.done()


async def test_the_model_has_the_workers_name_unless_another_is_set(folder: Path) -> None:
    async with Running(folder) as server:
        async with RunningGateway(server) as gateway:
            assert gateway.models == [server.engine.info.model]
        async with RunningGateway(server, served_model_name="mine") as gateway:
            assert (await gateway.http.get("/v1/models")).json()["data"][0]["id"] == "mine"


async def test_a_fetched_tokenizer_leaves_no_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with Running(folder) as server, RunningGateway(server) as gateway:
        assert os.listdir(tmp_path) == []  # it serves already, so even a killed gateway leaves no file
        server.engine.let_run()
        assert texts((await gateway.chat()).text) == EXPECTED


async def test_an_answer_survives_the_loss_of_two_workers_in_a_row(folder: Path) -> None:
    async with Running(folder) as a, Running(folder) as b, Running(folder) as c, RunningGateway(a, b, c) as gateway:
        response, first, others = await gateway.started_chat(a, b, c)
        parts = response.aiter_text()
        stream = await read_until(parts, tokens=2)
        first.engine.die()
        second = await generating_server(*others)
        stream += await read_until(parts, tokens=2)
        second.engine.die()
        (last,) = [server for server in others if server is not second]
        last.engine.let_run()
        stream += "".join([part async for part in parts])
        assert texts(stream) == EXPECTED
        assert [len(start.output_tokens) for start in last.engine.requests[-1].choices] == [2, 2]
        assert (await gateway.http.get("/status")).json()["totals"]["migrations"] == 2


async def read_until(parts: AsyncIterator[str], *, tokens: int) -> str:
    """Reads a stream until it contains this number of tokens."""
    read = ""
    while read.count('"delta":{"content":"') < tokens:
        read += await anext(parts)
    return read


async def generating_server(*servers: Running) -> Running:
    """Waits until one of the servers gets a group, and returns it."""
    waits = {asyncio.ensure_future(server.engine.submitted.wait()): server for server in servers}
    done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in pending:
        wait.cancel()
    return waits[done.pop()]


async def test_a_worker_that_is_stopped_gets_nothing_new_and_finishes_its_groups(folder: Path) -> None:
    async with Running(folder) as a, Running(folder) as b, RunningGateway(a, b) as gateway:
        response, first, (other,) = await gateway.started_chat(a, b)
        first.signals.receive()
        await gateway.until_state(first, WorkerState.DRAINING)
        other.engine.let_run()
        assert texts((await gateway.chat()).text) == EXPECTED
        first.engine.let_run()
        assert texts((await response.aread()).decode()) == EXPECTED
        assert await first.outcome() is Outcome.STOPPED
        await gateway.until_state(first, WorkerState.DEAD)


async def test_an_answer_of_a_worker_that_ends_at_once_continues_on_another_worker(folder: Path) -> None:
    async with Running(folder) as a, Running(folder) as b, RunningGateway(a, b) as gateway:
        response, first, (other,) = await gateway.started_chat(a, b)
        first.signals.receive()
        first.signals.receive()
        other.engine.let_run()
        assert texts((await response.aread()).decode()) == EXPECTED


async def test_a_new_server_at_the_address_of_a_worker_is_a_new_start(folder: Path) -> None:
    port = free_port()
    async with Running(folder, port=port) as first, RunningGateway(first) as gateway:
        gateway.gateway.router.fleet.cached_blocks.stored(id_of(first), [b"block"])
        first.signals.receive()
        await first.outcome()
        await gateway.until_state(first, WorkerState.DEAD)
        async with Running(folder, port=port) as second:
            await gateway.until_state(second, WorkerState.READY)
            assert gateway.gateway.router.fleet.cached_blocks.blocks(id_of(second)) == 0
            second.engine.let_run()
            assert texts((await gateway.chat()).text) == EXPECTED
            (worker,) = (await gateway.http.get("/status")).json()["workers"]
            assert worker["note"] is None


async def test_without_a_worker_a_gateway_makes_clients_retry(folder: Path) -> None:
    async with Running(folder) as server, RunningGateway(server) as gateway:
        server.signals.receive()
        await gateway.until_state(server, WorkerState.DEAD)
        response = await gateway.chat()
        assert (response.status_code, response.headers["retry-after"]) == (503, "2")
        assert response.json()["error"]["code"] == "no_worker"
        assert (await gateway.http.get("/ready")).status_code == 503
        assert not gateway.ended.done()


async def test_an_answer_waits_for_its_only_worker_to_come_back(folder: Path) -> None:
    port = free_port()
    patient = RoutingConfig(migration_wait_s=PATIENCE_S)
    async with Running(folder, port=port) as first, RunningGateway(first, routing=patient) as gateway:
        response, *_ = await gateway.started_chat(first)
        first.engine.die()
        assert await first.outcome() is Outcome.ENGINE_DIED
        async with Running(folder, port=port) as second:
            second.engine.let_run()
            assert texts((await response.aread()).decode()) == EXPECTED


async def test_a_worker_that_requires_another_key_is_unused_with_its_reason(folder: Path) -> None:
    async with Running(folder, api_keys=["client"], worker_key="secret") as server:
        async with RunningGateway(server, worker_key="secret") as gateway:
            server.engine.let_run()
            assert texts((await gateway.chat()).text) == EXPECTED
        assert "with the same --worker-key" in await failure_without_workers(plan_of(server))


async def test_a_gateway_keeps_the_cached_prompts_of_its_keys_apart_on_its_workers(folder: Path) -> None:
    async with Running(folder) as server, RunningGateway(server, api_keys=["one", "other"]) as gateway:
        server.engine.let_run()
        for key in ("one", "other", "one"):
            gateway.http.headers["authorization"] = f"Bearer {key}"
            assert texts((await gateway.chat()).text) == EXPECTED
        first, second, third = [request.cache_salt for request in server.engine.requests]
        assert first == third != second


async def test_a_gateway_that_finds_no_worker_lists_the_state_of_each(folder: Path) -> None:
    async with Running(folder, role=Role.PREFILL) as prefill:
        message = await failure_without_workers(plan_of(prefill, "http://127.0.0.1:1"))
    assert f"{id_of(prefill)} ({address(prefill)}) is ready" in message
    assert "127.0.0.1:1 (http://127.0.0.1:1) is starting: " in message


async def test_a_signal_ends_a_gateway_that_waits_for_a_worker(folder: Path) -> None:
    running = RunningGateway("http://127.0.0.1:1")
    running.signals.receive()
    async with running as gateway:
        assert await gateway.outcome() is Outcome.STOPPED_BEFORE_READY


async def test_prefill_and_decode_servers_work_together(folder: Path) -> None:
    leases = FakeLeases()
    starters = [Starter(leases=leases) for _ in range(3)]
    async with (
        Running(folder, role=Role.PREFILL, starter=starters[0]) as prefill,
        Running(folder, role=Role.DECODE, starter=starters[1]) as a,
        Running(folder, role=Role.DECODE, starter=starters[2]) as b,
        RunningGateway(prefill, a, b) as gateway,
    ):
        assert [server.engine.connected for server in (a, b)] == [[prefill.engine.info.transfer]] * 2
        for server in (a, b):
            server.engine.let_run()
        for _ in range(2):
            assert texts((await gateway.chat()).text) == EXPECTED
        assert len(prefill.engine.prefills) == 2
        assert a.engine.record.pulls + b.engine.record.pulls == 2
        assert leases.held == {}


async def test_workers_of_another_model_are_not_used(folder: Path) -> None:
    async with Running(folder) as right, Running(folder) as wrong:
        wrong.engine.info = msgspec.structs.replace(wrong.engine.info, vocab_size=9)
        async with RunningGateway(right) as gateway:
            joined = await gateway.http.post("/workers", json={"url": address(wrong)}, headers=ADMIN)
            assert joined.status_code == 201
            await gateway.until_state(wrong, WorkerState.DEAD)
            workers = (await gateway.http.get("/workers", headers=ADMIN)).json()["workers"]
            assert "it has a vocabulary of 9, and the tokenizer of fake here is for 512" in workers[1]["note"]


async def test_workers_with_another_dtype_are_used_once_all_former_ones_have_left(folder: Path) -> None:
    """Workers with another dtype after their restart used to be ignored until the gateway was restarted too."""
    async with Running(folder) as former, Running(folder) as newcomer:
        newcomer.engine.info = msgspec.structs.replace(newcomer.engine.info, dtype="float32")
        async with RunningGateway(former) as gateway:
            await gateway.http.post("/workers", json={"url": address(newcomer)}, headers=ADMIN)
            await gateway.until_state(newcomer, WorkerState.DEAD)
            former.signals.receive()
            await gateway.until_state(newcomer, WorkerState.READY)
            newcomer.engine.let_run()
            assert texts((await gateway.chat()).text) == EXPECTED


async def test_decode_works_without_a_lost_prefill_server_and_uses_it_again_when_it_returns(folder: Path) -> None:
    leases, port = FakeLeases(), free_port()
    prefill_engines = Starter(leases=leases)
    async with (
        Running(folder, role=Role.PREFILL, starter=prefill_engines, port=port) as first,
        Running(folder, role=Role.DECODE, starter=Starter(leases=leases)) as decode,
        RunningGateway(first, decode) as gateway,
    ):
        decode.engine.let_run()
        first.signals.receive()
        await gateway.until_state(first, WorkerState.DEAD)
        assert texts((await gateway.chat()).text) == EXPECTED
        assert decode.engine.record.pulls == 0
        async with Running(folder, role=Role.PREFILL, starter=prefill_engines, port=port) as second:
            await gateway.until_state(second, WorkerState.READY)
            assert texts((await gateway.chat()).text) == EXPECTED
            engines = prefill_engines.engines
            assert [len(engine.prefills) for engine in engines] == [0, 1]
            assert decode.engine.record.pulls == 1
            assert decode.engine.connected == [engine.info.transfer for engine in engines]


async def test_a_client_that_leaves_frees_its_group_on_the_worker(folder: Path) -> None:
    async with Running(folder) as server, RunningGateway(server) as gateway:
        response, *_ = await gateway.started_chat(server)
        await response.aclose()
        while server.engine.open:
            await server.http.get("/health")
        server.engine.check()


async def test_a_stop_string_ends_a_choice_as_on_one_server(folder: Path) -> None:
    async with Running(folder) as server, RunningGateway(server) as gateway:
        server.engine.let_run()
        body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "stop": "other", "seed": 1}
        answers = [(await http.post("/v1/chat/completions", json=body)).json() for http in (server.http, gateway.http)]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert answers[1]["choices"][0]["message"]["content"] == "the hand and the "
        assert answers[0]["usage"] == answers[1]["usage"]


async def test_a_worker_named_as_openai_takes_texts_before_it_has_been_reached() -> None:
    async with server_client() as client:
        gateway, _ = make_gateway(plan_of("http://127.0.0.1:1,openai", "http://127.0.0.1:2"), client)
        assert [member.facts.takes_texts for member in gateway.router.fleet.members] == [True, False]
        await gateway.close()
