"""Workers join and leave a gateway while it runs, at an operator's request or by a file."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from motet.deploy.discover import ProbeSettings
from motet.deploy.gateway import Gateway
from motet.deploy.gateway_models import GatewayModels, TokenizerRules, Tokenizers
from motet.engine import WorkerState
from motet.engines.http import server_client
from motet.errors import ConfigError
from motet.routing.router import Router
from motet.routing.text_router import TextRouter
from motet.routing.workers.fleet import Fleet
from motet.sampling_defaults import DefaultRules
from motet.settings.gateway_config import GatewayConfig
from motet.settings.named_worker import NamedWorker
from motet.types import Role
from tests.deploy.gateways import ADMIN, HEARTBEAT_S, RunningGateway, address, id_of
from tests.deploy.running import EXPECTED, Running, texts
from tests.error_response import assert_error

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
        assert workers[1]["note"].endswith("it was named with role prefill, but its role is both")


async def test_a_taken_address_and_an_unknown_id_are_refused(folder: Path) -> None:
    async with Running(folder) as server, RunningGateway(server) as gateway:
        for response in (
            await join(gateway, server),
            await join(gateway, f"{address(server)}/v1/"),
            await join(gateway, "http://127.0.0.1:1", id=id_of(server)),
        ):
            assert_error(response, status=400, code="worker_exists")
        assert (await leave(gateway, "nobody", drain_s=0)).status_code == 404
        assert (await gateway.http.post("/workers/nobody/drain", headers=ADMIN)).status_code == 404
        assert await ids(gateway) == [id_of(server)]


async def test_two_servers_behind_one_address_have_two_ids(folder: Path) -> None:
    async with Running(folder) as server, RunningGateway(server) as gateway:
        assert (await join(gateway, f"{address(server)}/other")).json()["id"] == f"{id_of(server)}-2"
        assert (await join(gateway, f"{address(server)}/third")).json()["id"] == f"{id_of(server)}-3"


async def test_a_drained_worker_finishes_its_groups_and_stays(folder: Path) -> None:
    async with Running(folder) as a, Running(folder) as b, RunningGateway(a, b) as gateway:
        response, first, (other,) = await gateway.started_chat(a, b)
        drained = await gateway.http.post(f"/workers/{id_of(first)}/drain", headers=ADMIN)
        assert (drained.status_code, drained.json()["state"]) == (202, "draining")
        other.engine.let_run()
        for _ in range(2):
            assert texts((await gateway.chat()).text) == EXPECTED
        first.engine.let_run()
        assert texts((await response.aread()).decode()) == EXPECTED
        assert len(first.engine.requests) == 1
        assert set(await ids(gateway)) == {id_of(a), id_of(b)}


async def test_a_worker_that_leaves_can_finish_its_groups(folder: Path) -> None:
    async with Running(folder) as a, Running(folder) as b, RunningGateway(a, b) as gateway:
        response, first, _ = await gateway.started_chat(a, b)
        assert (await leave(gateway, first, drain_s=3600)).status_code == 202
        assert (await leave(gateway, first, drain_s=0)).status_code == 202
        assert set(await ids(gateway)) == {id_of(a), id_of(b)}
        first.engine.let_run()
        assert texts((await response.aread()).decode()) == EXPECTED
        await gateway.until_state(first, None)
        assert not first.ended.done()
        first.engine.check()
        assert (await gateway.http.get("/status")).json()["totals"]["migrations"] == 0


async def test_a_group_that_a_leaving_worker_does_not_finish_in_time_continues_elsewhere(folder: Path) -> None:
    async with Running(folder) as a, Running(folder) as b, RunningGateway(a, b) as gateway:
        response, first, (other,) = await gateway.started_chat(a, b)
        await leave(gateway, first, drain_s=0)
        await gateway.until_state(first, None)
        other.engine.let_run()
        assert texts((await response.aread()).decode()) == EXPECTED
        assert await ids(gateway) == [id_of(other)]


FIRST: dict[str, int | float] = {"temperature": 0.5, "top_k": 20}


@pytest.mark.parametrize(
    ("rules", "expected", "warnings"),
    [
        (DefaultRules(), FIRST, 1),
        (DefaultRules(override={"temperature": 0.7}), {"temperature": 0.7, "top_k": 20}, 1),
        (DefaultRules(replaced={}), {}, 0),
    ],
    ids=["workers'", "override", "none"],
)
async def test_defaults_of_sampling_fields_are_those_of_the_first_worker(
    folder: Path, caplog: pytest.LogCaptureFixture, rules: DefaultRules, expected: dict[str, object], warnings: int
) -> None:
    async with (
        Running(folder, defaults=FIRST) as one,
        Running(folder, defaults={"top_k": 9}) as other,
        RunningGateway(one, defaults=rules) as gateway,
    ):
        await join(gateway, other)
        await gateway.until_state(other, WorkerState.READY)
        for server in (one, other):
            server.engine.let_run()
            assert (await gateway.chat()).status_code == 200
        (card,) = (await gateway.http.get("/v1/models")).json()["data"]
        assert card["default_sampling_params"] == expected
        for group in (*one.engine.requests, *other.engine.requests):
            assert group.sampling.temperature == expected.get("temperature", 1.0)
            assert group.sampling.top_k == expected.get("top_k", 0)
        assert caplog.text.count(f"the worker at {address(other)} has the default sampling parameters") == warnings


async def test_a_worker_that_was_never_reached_leaves_at_once(folder: Path) -> None:
    async with Running(folder) as server, RunningGateway(server, "http://127.0.0.1:1") as gateway:
        assert "127.0.0.1:1" in await ids(gateway)
        await leave(gateway, "127.0.0.1:1", drain_s=3600)
        await gateway.until_state("127.0.0.1:1", None)


async def test_a_worker_that_has_left_can_join_again(folder: Path) -> None:
    async with Running(folder) as server, RunningGateway(server) as gateway:
        for _ in range(2):
            await leave(gateway, server, drain_s=0)
            await gateway.until_state(server, None)
            assert (await gateway.chat()).status_code == 503
            await join(gateway, server)
            await gateway.until_state(server, WorkerState.READY)
        server.engine.let_run()
        assert texts((await gateway.chat()).text) == EXPECTED


async def test_a_gateway_that_is_watched_again_continues_where_it_was() -> None:
    """Between its start and its service it used to forget which workers were leaving."""
    router = Router(Fleet())
    models = GatewayModels(router, Tokenizers(TokenizerRules({})), texts=TextRouter(router.fleet))
    urls = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    async with server_client() as client:
        probes = ProbeSettings(config=GatewayConfig(workers=urls), client=client)
        gateway = Gateway(router, models.prepare, probes=probes, drain_s=0, heartbeat_s=HEARTBEAT_S)
        leaving = router.fleet.get("127.0.0.1:1")
        assert leaving is not None
        prompt = leaving.load.prompts.add(5)
        async with gateway.watched():
            await gateway.leave("127.0.0.1:1", drain_s=3600)
        async with gateway.watched():
            leaving.load.prompts.remove(prompt)
            while router.fleet.get("127.0.0.1:1"):
                await router.fleet.changes.wait()
    assert [member.id for member in router.fleet.members] == ["127.0.0.1:2"]
    router.fleet.check()


class Defect(Exception):
    """A defect of Motet."""


class BrokenList:
    """A list of workers that cannot be followed at first."""

    def __init__(self, *named: NamedWorker) -> None:
        self.named: Sequence[NamedWorker] = ()
        self._next: Iterator[Defect | Sequence[NamedWorker]] = iter((Defect("list"), named))

    async def next(self) -> Sequence[NamedWorker]:
        match next(self._next, None):
            case Defect() as defect:
                raise defect
            case None:
                await asyncio.Event().wait()
            case named:
                return named
        return ()


async def test_a_defect_in_following_a_list_or_in_a_departure_ends_nothing_else(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router(Fleet())
    models = GatewayModels(router, Tokenizers(TokenizerRules({})), texts=TextRouter(router.fleet))
    urls = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    async with server_client() as client:
        probes = ProbeSettings(config=GatewayConfig(workers=urls), client=client)
        listed = BrokenList(NamedWorker("http://127.0.0.1:3"))
        gateway = Gateway(router, models.prepare, probes=probes, drain_s=0, heartbeat_s=HEARTBEAT_S, listed=listed)

        async def evict(*_: object) -> None:
            raise Defect("departure")

        monkeypatch.setattr(router.fleet, "evict", evict)
        async with gateway.watched() as watching:
            await gateway.leave("127.0.0.1:1", drain_s=0)
            while [member.id for member in router.fleet.members] != ["127.0.0.1:2", "127.0.0.1:3"]:
                await router.fleet.changes.wait()
            assert not watching.done()
    assert {record.getMessage() for record in caplog.records if record.exc_info} == {
        "127.0.0.1:1: it could not leave in order",
        "the list of workers could not be followed; it is read again",
    }


async def test_workers_follow_their_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "workers"
    async with Running(folder) as a, Running(folder) as b:
        write(file, f"# workers of this cell\n{address(a)},both  # the first\n\n")
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


async def test_a_file_removes_only_workers_that_it_added(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "workers"
    async with Running(folder) as a, Running(folder) as b:
        write(file, f"{address(a)}\n{address(b)}\n")
        async with RunningGateway(a, file=file) as gateway:
            write(file, "")
            await gateway.until_state(b, None)
            assert await ids(gateway) == [id_of(a)]


async def test_the_file_does_not_bring_back_a_worker_that_an_operator_removed(folder: Path, tmp_path: Path) -> None:
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
            response, *_ = await gateway.started_chat(a)
            write(file, "")
            await gateway.until_state(a, WorkerState.DRAINING)
            write(file, f"{address(a)}\n{address(b)}\n")
            await gateway.until_state(b, WorkerState.READY)  # so the file has been read
            a.engine.let_run()
            assert texts((await response.aread()).decode()) == EXPECTED
            await gateway.until_state(a, WorkerState.READY)  # a draining worker is ready again only after it has left


async def test_a_file_that_is_missing_at_the_start_is_refused(tmp_path: Path) -> None:
    async with RunningGateway(file=tmp_path / "gone") as gateway:
        with pytest.raises(ConfigError, match=r"--workers-file .*gone: cannot be read"):
            await gateway.outcome()


def write(file: Path, text: str) -> None:
    """Replaces the file at once, as every program that writes such a file should."""
    new = file.with_name("new")
    new.write_text(text)
    os.replace(new, file)
