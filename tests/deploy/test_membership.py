"""Workers that join and leave a gateway while it runs, by an operator's word or by a file's."""

import asyncio
import os
from pathlib import Path

import httpx
import pytest

from motet.config import CellConfig, GatewayConfig, RoutingConfig
from motet.deploy.compose import make_router
from motet.deploy.discover import FoundServer, KeptEngine
from motet.deploy.gateway import Gateway
from motet.deploy.gateway_models import GatewayModels
from motet.deploy.gateway_parts import GatewayRules
from motet.deploy.tokenizers import TokenizerRules, Tokenizers
from motet.engines.base import WorkerState
from motet.engines.wire import EngineReport
from motet.errors import ConfigError, EngineDiedError
from motet.routing.text_routed import TextRouted
from motet.text.tokenizer import Tokenizer
from motet.types import EngineKind, Role
from tests.deploy.gateways import ADMIN, HEARTBEAT_S, RunningGateway, address, id_of
from tests.deploy.running import Running
from tests.deploy.test_gateway import EXPECTED, texts

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def join(gateway: RunningGateway, server: Running | str, **fields: object) -> httpx.Response:
    url = server if isinstance(server, str) else address(server)
    return await gateway.http.post("/workers", json={"url": url, **fields}, headers=ADMIN)


async def leave(gateway: RunningGateway, server: Running | str, *, drain_s: float) -> httpx.Response:
    id = server if isinstance(server, str) else id_of(server)
    return await gateway.http.delete(f"/workers/{id}", params={"drain_timeout": drain_s}, headers=ADMIN)


async def ids(gateway: RunningGateway) -> list[str]:
    return [worker["id"] for worker in (await gateway.http.get("/workers", headers=ADMIN)).json()["workers"]]


async def test_a_worker_that_joins_gets_groups_once_it_has_been_reached(folder: Path) -> None:
    async with Running(folder) as first, Running(folder) as second, RunningGateway(first) as gateway:
        joined = await join(gateway, second, role="both", id="second")
        assert (joined.status_code, joined.json()) == (201, {"id": "second", "state": "starting"})
        await gateway.until_state("second", WorkerState.READY)
        await leave(gateway, first, drain_s=0)
        await gateway.until_state(first, None)
        second.engine.let_run()
        assert texts((await gateway.chat()).text) == EXPECTED


async def test_a_worker_that_joins_with_a_role_it_does_not_have_is_not_used(folder: Path) -> None:
    async with Running(folder) as first, Running(folder) as second, RunningGateway(first) as gateway:
        await join(gateway, second, role=Role.PREFILL)
        await gateway.until_state(second, WorkerState.DEAD)
        workers = (await gateway.http.get("/workers", headers=ADMIN)).json()["workers"]
        assert workers[1]["note"].endswith("it was named as prefill, and its role is both")


async def test_who_is_taken_or_unknown_is_refused(folder: Path) -> None:
    async with Running(folder) as server, RunningGateway(server) as gateway:
        for response in (
            await join(gateway, server),
            await join(gateway, f"{address(server)}/v1/"),
            await join(gateway, "http://127.0.0.1:1", id=id_of(server)),
        ):
            assert (response.status_code, response.json()["error"]["code"]) == (400, "worker_exists")
        assert (await leave(gateway, "nobody", drain_s=0)).status_code == 404
        assert (await gateway.http.post("/workers/nobody/drain", headers=ADMIN)).status_code == 404
        assert await ids(gateway) == [id_of(server)]


async def test_two_servers_behind_one_address_have_two_ids(folder: Path) -> None:
    async with Running(folder) as server, RunningGateway(server) as gateway:
        assert (await join(gateway, f"{address(server)}/other")).json()["id"] == f"{id_of(server)}-2"
        assert (await join(gateway, f"{address(server)}/third")).json()["id"] == f"{id_of(server)}-3"


async def test_a_worker_that_is_drained_ends_what_it_has_and_stays(folder: Path) -> None:
    async with Running(folder) as a, Running(folder) as b, RunningGateway(a, b) as gateway:
        response, first = await gateway.begun_chat(a, b)
        drained = await gateway.http.post(f"/workers/{id_of(first)}/drain", headers=ADMIN)
        assert (drained.status_code, drained.json()["state"]) == (202, "draining")
        other = b if first is a else a
        other.engine.let_run()
        for _ in range(2):
            assert texts((await gateway.chat()).text) == EXPECTED
        first.engine.let_run()
        assert texts((await response.aread()).decode()) == EXPECTED
        assert len(first.engine.requests) == 1
        assert set(await ids(gateway)) == {id_of(a), id_of(b)}


async def test_a_worker_that_leaves_may_end_what_it_has(folder: Path) -> None:
    async with Running(folder) as a, Running(folder) as b, RunningGateway(a, b) as gateway:
        response, first = await gateway.begun_chat(a, b)
        assert (await leave(gateway, first, drain_s=15)).status_code == 202
        assert (await leave(gateway, first, drain_s=0)).status_code == 202
        assert set(await ids(gateway)) == {id_of(a), id_of(b)}
        first.engine.let_run()
        assert texts((await response.aread()).decode()) == EXPECTED
        await gateway.until_state(first, None)
        assert not first.ended.done()
        first.engine.check()
        assert (await gateway.http.get("/status")).json()["totals"]["migrations"] == 0


async def test_what_a_leaving_worker_does_not_end_in_time_goes_on_elsewhere(folder: Path) -> None:
    async with Running(folder) as a, Running(folder) as b, RunningGateway(a, b) as gateway:
        response, first = await gateway.begun_chat(a, b)
        other = b if first is a else a
        await leave(gateway, first, drain_s=0)
        await gateway.until_state(first, None)
        other.engine.let_run()
        assert texts((await response.aread()).decode()) == EXPECTED
        assert await ids(gateway) == [id_of(other)]


async def test_a_worker_that_was_never_reached_leaves_at_once(folder: Path) -> None:
    async with Running(folder) as server, RunningGateway(server, "http://127.0.0.1:1") as gateway:
        await leave(gateway, "127.0.0.1:1", drain_s=3600)
        await gateway.until_state("127.0.0.1:1", None)


async def test_who_has_left_may_join_again(folder: Path) -> None:
    async with Running(folder) as server, RunningGateway(server) as gateway:
        for _ in range(2):
            await leave(gateway, server, drain_s=0)
            await gateway.until_state(server, None)
            assert (await gateway.chat()).status_code == 503
            await join(gateway, server)
            await gateway.until_state(server, WorkerState.READY)
        server.engine.let_run()
        assert texts((await gateway.chat()).text) == EXPECTED


async def test_a_gateway_that_is_watched_again_goes_on_where_it_was() -> None:
    """Between its start and its service it once forgot who was leaving."""

    router = make_router(RoutingConfig(), CellConfig())
    gateway = Gateway(
        router,
        GatewayModels(router, Tokenizers(TokenizerRules({})), TextRouted(router.fleet)),
        GatewayConfig(workers=("http://a:1", "http://b:1")),
        server_at=lambda named: FoundServer(named.url, {EngineKind.MOTET: Unreachable}),
        rules=GatewayRules(drain_s=0, heartbeat_s=HEARTBEAT_S),
    )
    leaving = router.fleet.get("a:1")
    assert leaving is not None
    reading = leaving.books.give(tokens=5)
    first = asyncio.create_task(gateway.watch())
    await gateway.looked()
    await gateway.leave("a:1", drain_s=3600)
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(gateway.watch())
    leaving.books.drop(reading)
    while router.fleet.get("a:1"):
        await router.fleet.changed()
    second.cancel()
    await asyncio.wait([second])
    assert [member.id for member in router.fleet.members] == ["b:1"]
    router.fleet.check()


class Unreachable:
    """A `Way` to nobody."""

    async def report(self) -> EngineReport:
        raise EngineDiedError("connection refused")

    def kept(self, report: EngineReport) -> KeptEngine:
        raise AssertionError(f"nobody reports {report}")

    async def tokenizer(self) -> dict[str, bytes]:
        raise AssertionError("nobody reports")

    async def check(self, tokenizer: Tokenizer, model: str) -> None:
        raise AssertionError(f"nobody reports {model}")


async def test_workers_follow_their_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "workers"
    async with Running(folder) as a, Running(folder) as b:
        write(file, f"# ours\n{address(a)},both  # the first\n\n")
        async with RunningGateway(file=file) as gateway:
            assert await ids(gateway) == [id_of(a)]
            write(file, f"{address(a)}\n{address(b)}\n")
            await gateway.until_state(b, WorkerState.READY)
            write(file, f"{address(b)}\n")
            await gateway.until_state(a, None)
            b.engine.let_run()
            assert texts((await gateway.chat()).text) == EXPECTED
            write(file, f"{address(a)}\n{address(b)}\n")
            await gateway.until_state(a, WorkerState.READY)


async def test_a_file_removes_only_whom_it_brought(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "workers"
    async with Running(folder) as a, Running(folder) as b:
        write(file, f"{address(a)}\n{address(b)}\n")
        async with RunningGateway(a, file=file) as gateway:
            write(file, "")
            await gateway.until_state(b, None)
            assert await ids(gateway) == [id_of(a)]


async def test_whom_an_operator_removes_the_file_does_not_bring_back(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "workers"
    async with Running(folder) as a, Running(folder) as b:
        write(file, f"{address(a)}\n")
        async with RunningGateway(file=file) as gateway:
            await leave(gateway, a, drain_s=0)
            await gateway.until_state(a, None)
            write(file, f"{address(a)}\n{address(b)}\n")
            await gateway.until_state(b, WorkerState.READY)
            assert await ids(gateway) == [id_of(b)]
            await join(gateway, a, id="back")
            write(file, f"{address(b)}\n")
            await gateway.until_state("back", WorkerState.READY)
            write(file, "")
            await gateway.until_state(b, None)
            assert await ids(gateway) == ["back"]


async def test_a_line_that_comes_back_while_its_worker_leaves_brings_it_back(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "workers"
    async with Running(folder) as a, Running(folder) as b:
        write(file, f"{address(a)}\n")
        async with RunningGateway(file=file) as gateway:
            response, _ = await gateway.begun_chat(a)
            write(file, "")
            await gateway.until_state(a, WorkerState.DRAINING)
            write(file, f"{address(a)}\n{address(b)}\n")
            await gateway.until_state(b, WorkerState.READY)  # so the file has been read
            a.engine.let_run()
            assert texts((await response.aread()).decode()) == EXPECTED
            await gateway.until_state(a, None)
            await gateway.until_state(a, WorkerState.READY)


async def test_a_file_that_is_missing_at_the_start_is_refused(tmp_path: Path) -> None:
    async with RunningGateway(file=tmp_path / "gone") as gateway:
        with pytest.raises(ConfigError, match=r"--workers-file .*gone: cannot be read"):
            await gateway.outcome()


def write(file: Path, text: str) -> None:
    """All at once, as whoever writes such files should."""
    new = file.with_name("new")
    new.write_text(text)
    os.replace(new, file)
