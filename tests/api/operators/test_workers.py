"""Models, status, metrics, health, drain: every worker is queried, and no worker can delay the answer."""

import asyncio
import dataclasses
import os
import re
import time
from importlib.metadata import version
from typing import NamedTuple

import msgspec
import pytest

from motet.api.http.admission import client_id_of
from motet.api.service import snapshot_workers
from motet.engine import Worker, WorkerReport, WorkerState
from motet.errors import EngineClosedError, EngineDiedError, EngineError, EngineSilentError
from motet.metrics.routing import RoutingFigures
from motet.metrics.stats import EngineStats
from motet.testing.fake_engine import FakeEngine, fake_info
from motet.transfer.ticket import TransferAddress
from motet.types import Role
from tests.api.serving import (
    MODEL,
    ChangeableWorkers,
    EngineWithoutWorkers,
    Served,
    Serving,
    WatchedEngine,
    hello,
    ready,
)
from tests.error_response import assert_error
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


class FiguresEngine(FakeEngine):
    """An engine that reports these figures, or raises this error."""

    def __init__(self, role: Role, report: EngineStats | EngineError) -> None:
        super().__init__(hello, info=fake_info(role=role, transfer=TransferAddress(f"{role} 1", "127.0.0.1", 20000)))
        self._report = report

    async def stats(self) -> EngineStats:
        if isinstance(self._report, EngineError):
            raise self._report
        return self._report


class SilentEngine(FakeEngine):
    def __init__(self, role: Role = Role.BOTH) -> None:
        super().__init__(hello, info=fake_info(role=role))

    async def stats(self) -> EngineStats:
        await asyncio.Event().wait()
        raise AssertionError("never answered")


PREFILL_STATS = EngineStats(
    prefills=2, prefill_tokens=80, leases=1, oldest_lease_s=1.5, blocks_used=5, groups_running=1, choices_running=1
)
DECODE_STATS = EngineStats(
    prefill_tokens=2, recomputed_tokens=2, transfers=2, transfer_bytes=4096, forks=14, blocks_shared=70, pulls_open=1
)
DIED, CLOSED = EngineDiedError("the engine's process is gone"), EngineClosedError("the engine was closed")


def cell(prefill: FakeEngine, decode: FakeEngine, *, prefill_is_here: bool = True) -> list[Worker]:
    return [
        Worker("prefill-0", prefill, "127.0.0.1:20000", local=prefill_is_here),
        Worker("decode-0", decode, "127.0.0.1:22000"),
    ]


def reporting(prefill: EngineStats | EngineError, decode: EngineStats | EngineError) -> list[Worker]:
    return cell(FiguresEngine(Role.PREFILL, prefill), FiguresEngine(Role.DECODE, decode))


async def test_status_shows_the_worker_at_this_moment(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(gated=True))
    request = await served.engine.start_request(served.chat(n=3))
    status = await served.status()
    assert (status["model"], status["version"]) == (MODEL, version("motet"))
    (worker,) = status["workers"]
    assert (worker["id"], worker["role"], worker["state"]) == ("engine-0", "both", "ready")
    assert (worker["choices_waiting"], worker["transfer"]) == (3, None)
    served.engine.go(20)
    assert (await request).status_code == 200


async def test_the_status_of_a_cell_shows_each_worker_and_their_totals(serve: Serving) -> None:
    moves = {("died", "resumed"): 2, ("silent", "limit"): 1}
    figures = RoutingFigures(bypasses={"short": 3, "queue": 1}, migrations=moves, choices_resumed=9)
    served = await serve(workers=reporting(PREFILL_STATS, DECODE_STATS), figures=figures)
    status = await served.status()
    prefill, decode = status["workers"]
    assert (prefill["id"], prefill["role"], prefill["address"]) == ("prefill-0", "prefill", "127.0.0.1:20000")
    assert prefill["transfer"] == {"engine_id": "prefill 1", "host": "127.0.0.1", "port": 20000}
    assert (prefill["leases"], prefill["oldest_lease_s"], prefill["pulls_open"]) == (1, 1.5, 0)
    assert (decode["leases"], decode["oldest_lease_s"], decode["pulls_open"]) == (0, None, 1)
    for expected in (
        {"prefills": 2, "prefill_tokens": 82, "transfers": 2, "transfer_bytes": 4096, "recomputed_tokens": 2},
        {"forks": 14, "blocks_shared": 70, "migrations": 3, "choices_resumed": 9, "bypasses": 4},
    ):
        assert status["totals"].items() >= expected.items()


async def test_clients_are_shown_by_the_number_of_their_key_and_all_others_as_one(serve: Serving) -> None:
    ids = [client_id_of(key) for key in ("sk-a", "sk-b")]
    figures = RoutingFigures(
        client_choices={ids[1]: 3, "an address": 4, "a salt": 5},
        client_blocks={ids[1]: 30},
        client_queued_choices={ids[0]: 6},
    )
    served = await serve(figures=figures, api_keys=("sk-a", "sk-b"), key_share=("sk-b=2.5",))
    headers = {"authorization": "Bearer sk-a"}
    assert (await served.http.get("/status", headers=headers)).json()["clients"] == [
        {"client": "key-0", "share": 1.0, "choices": 0, "blocks": 0, "choices_queued": 6},
        {"client": "key-1", "share": 2.5, "choices": 3, "blocks": 30, "choices_queued": 0},
        {"client": "other", "share": 1.0, "choices": 9, "blocks": 0, "choices_queued": 0},
    ]
    text = (await served.http.get("/metrics", headers=headers)).text
    assert 'motet:client_choices{client="key-1",model_name="tiny"} 3.0' in text
    assert 'motet:client_choices{client="other",model_name="tiny"} 9.0' in text
    assert not any(secret in text for secret in ("sk-", "an address", *ids))


@pytest.mark.parametrize("error", [DIED, CLOSED])
async def test_a_dead_worker_is_shown_as_holding_nothing(serve: Serving, error: EngineError) -> None:
    served = await serve(workers=reporting(error, DECODE_STATS))
    prefill, decode = (await served.status())["workers"]
    assert (prefill["state"], prefill["groups_running"], prefill["leases"]) == ("dead", 0, 0)
    assert decode["state"] == "ready"
    text = await served.metrics()
    assert 'motet:kv_transfers_total{model_name="tiny",role="decode",worker="decode-0"} 2.0' in text
    assert 'motet:worker_state{model_name="tiny",state="dead",worker="prefill-0"} 1.0' in text
    assert 'role="prefill"' not in text


async def test_counters_do_not_decrease_when_a_worker_dies_and_its_engine_is_replaced(serve: Serving) -> None:
    name = 'motet:kv_transfers_total{model_name="tiny",role="decode",worker="decode-0"}'
    first, second = (ready(Worker("decode-0", FiguresEngine(Role.DECODE, DECODE_STATS), "here")) for _ in range(2))
    workers = ChangeableWorkers([first])
    served = await serve(workers=workers)
    for report, shown in (
        (first, 2),
        (dataclasses.replace(first, state=WorkerState.DEAD), 2),
        (dataclasses.replace(first, state=WorkerState.STARTING), 2),
        (second, 4),
        (second, 4),
    ):
        workers.listed[0] = report
        assert f"{name} {shown}.0" in await served.metrics()


async def test_metrics_report_the_resources_of_the_server_s_process(served: Served) -> None:
    found = re.findall(r"^process_(\w+) ([0-9.e+]+)$", await served.metrics(), re.MULTILINE)
    figures = {name: float(value) for name, value in found}
    assert figures["resident_memory_bytes"] > 2**20 and figures["open_fds"] > 3
    assert 0 < figures["cpu_seconds_total"] <= time.process_time()


@pytest.mark.slow
async def test_a_silent_worker_holds_neither_status_nor_metrics_up(serve: Serving) -> None:
    served = await serve(workers=cell(SilentEngine(Role.PREFILL), FiguresEngine(Role.DECODE, DECODE_STATS)))
    status, metrics = await asyncio.gather(served.http.get("/status"), served.http.get("/metrics"))
    prefill, decode = status.json()["workers"]
    assert (prefill["state"], decode["state"]) == ("silent", "ready")
    assert prefill["blocks_total"] == 1024
    assert not {"groups_running", "blocks_used", "leases", "oldest_lease_s"} & set(prefill)  # unknown
    assert status.json()["totals"]["transfers"] == 2
    assert "motet:kv_transfers_total" in metrics.text


async def test_workers_are_queried_concurrently() -> None:
    meeting = asyncio.Barrier(3)

    class MeetingEngine(FakeEngine):
        async def stats(self) -> EngineStats:
            await meeting.wait()
            return EngineStats()

    reports = [ready(Worker(str(i), MeetingEngine(hello), "nowhere")) for i in range(3)]
    answers = await snapshot_workers(reports, patience_s=PATIENCE_S)
    assert [answer.report.id for answer in answers] == ["0", "1", "2"]
    assert [answer.state for answer in answers] == [WorkerState.READY] * 3
    (silent,) = await snapshot_workers([ready(Worker("3", SilentEngine(), "nowhere"))], patience_s=0.01)
    assert silent.state is WorkerState.SILENT


@pytest.mark.parametrize(("local", "state"), [(False, WorkerState.SILENT), (True, WorkerState.DEAD)])
async def test_an_engine_in_a_long_step_is_silent_elsewhere_and_killed_here(local: bool, state: WorkerState) -> None:
    """A gateway used to show such a worker as dead, with zeros as its figures."""
    engine = FiguresEngine(Role.BOTH, EngineSilentError("the engine of the worker sends no heartbeats"))
    (snapshot,) = await snapshot_workers([ready(Worker("engine-0", engine, "there", local=local))], patience_s=60)
    assert snapshot.state is state


async def test_figures_of_other_servers_are_not_published_here(serve: Serving) -> None:
    prefill, decode = (FiguresEngine(role, EngineStats()) for role in (Role.PREFILL, Role.DECODE))
    served = await serve(workers=cell(prefill, decode, prefill_is_here=False))
    text = await served.metrics()
    assert 'role="decode",worker="decode-0"' in text
    assert 'role="prefill"' not in text
    assert 'motet:worker_state{model_name="tiny",state="ready",worker="prefill-0"} 1.0' in text  # the router's own
    assert len((await served.status())["workers"]) == 2


class ProbeStatuses(NamedTuple):
    """Statuses of GET /health and GET /ready."""

    health: int
    ready: int


async def health(served: Served) -> ProbeStatuses:
    responses = [await served.http.get(path) for path in ("/health", "/ready", "/ping")]
    responses.append(await served.http.post("/ping"))
    assert {response.status_code for response in responses[2:]} == {responses[0].status_code}
    assert all(r.json()["error"]["code"] == "engine_died" for r in responses if r.status_code != 200)
    return ProbeStatuses(health=responses[0].status_code, ready=responses[1].status_code)


async def test_a_cell_is_healthy_while_a_worker_decodes(serve: Serving) -> None:
    assert await health(await serve(workers=reporting(DIED, DECODE_STATS))) == ProbeStatuses(health=200, ready=200)
    assert await health(await serve(workers=reporting(PREFILL_STATS, DIED))) == ProbeStatuses(health=503, ready=503)


async def test_a_prefill_server_is_healthy_while_its_engine_lives(serve: Serving) -> None:
    alive, dead = (FiguresEngine(Role.PREFILL, report) for report in (PREFILL_STATS, DIED))
    assert await health(await serve(workers=[Worker("prefill-0", alive, "here")])) == ProbeStatuses(
        health=200, ready=200
    )
    assert await health(await serve(workers=[Worker("prefill-0", dead, "here")])) == ProbeStatuses(
        health=503, ready=503
    )


async def test_engine_busy_with_a_long_step_is_healthy(serve: Serving) -> None:
    served = await serve(workers=[Worker("engine-0", SilentEngine(), "here")])
    assert (await served.http.get("/health")).status_code == 200


def engine_with(role: Role, *, pid: int) -> FiguresEngine:
    engine = FiguresEngine(role, DECODE_STATS)
    engine.info = msgspec.structs.replace(engine.info, pid=pid)
    return engine


async def test_a_worker_that_joins_or_returns_is_shown_in_its_present_state(serve: Serving) -> None:
    first = Worker("decode-0", engine_with(Role.DECODE, pid=1), "here")
    workers = ChangeableWorkers([ready(first)])
    served = await serve(workers=workers)

    async def shown() -> list[tuple[str, str, int | None]]:
        return [(w["id"], w["state"], w["pid"]) for w in (await served.status())["workers"]]

    assert await shown() == [("decode-0", "ready", 1)]
    workers.listed[0] = WorkerReport(id="decode-0", address="here", state=WorkerState.STARTING, worker=first)
    workers.listed.append(ready(Worker("decode-1", engine_with(Role.DECODE, pid=2), "there")))
    assert await shown() == [("decode-0", "starting", None), ("decode-1", "ready", 2)]  # the pid is the former engine's
    workers.listed[0] = ready(Worker("decode-0", engine_with(Role.DECODE, pid=3), "here"))
    assert await shown() == [("decode-0", "ready", 3), ("decode-1", "ready", 2)]
    text = await served.metrics()
    assert 'motet:kv_transfers_total{model_name="tiny",role="decode",worker="decode-1"} 2.0' in text
    del workers.listed[1]
    assert await shown() == [("decode-0", "ready", 3)]
    assert "decode-1" not in await served.metrics()


async def test_a_worker_that_was_never_reached_is_listed_with_the_known_facts(serve: Serving) -> None:
    report = WorkerReport(id="remote-0", address="http://10.0.0.1:8000", state=WorkerState.STARTING)
    served = await serve(workers=ChangeableWorkers([report]))
    (worker,) = (await served.status())["workers"]
    assert (worker["id"], worker["address"]) == ("remote-0", "http://10.0.0.1:8000")
    assert worker["state"] == "starting"
    unknown = {name for name, value in worker.items() if value is None}
    assert unknown == {
        *("role", "pid", "kind", "model", "weight_version", "transfer", "transfer_backend"),
        *("device", "kernels", "kernels_note", "kv_cache_reason", "resident_bytes"),
        *("oldest_lease_s", "last_decision", "note"),
    }
    assert {name for name, value in worker.items() if value == 0} == {
        *("groups_running", "choices_running", "choices_waiting", "blocks_total", "blocks_used", "blocks_cached"),
        *("block_size", "blocks_kept", "trunks_kept", "score_bytes"),
        *("leases", "pulls_open", "blocks_pulling", "max_num_seqs", "kv_cache_bytes"),
    }


async def test_a_local_worker_reports_its_kernels_and_its_memory(serve: Serving) -> None:
    facts = {"device": "cpu", "kernels": "torch", "kernels_note": "no compiler", "kv_cache_reason": "default"}
    info = msgspec.structs.replace(fake_info(), pid=os.getpid(), **facts)
    workers = [
        Worker(id, FakeEngine(lambda *_: [0], info=info), "here", local=id == "here") for id in ("here", "remote")
    ]
    reports = [WorkerReport(id=worker.id, address="", state=WorkerState.READY, worker=worker) for worker in workers]
    served = await serve(workers=ChangeableWorkers(reports))
    here, remote = (await served.status())["workers"]
    assert {name: here[name] for name in facts} == facts
    assert here["kv_cache_bytes"] == info.num_blocks * info.bytes_per_block
    assert here["resident_bytes"] > 2**20
    assert remote["resident_bytes"] is None


async def test_the_keeper_s_state_of_a_worker_wins_over_the_worker_s_own(serve: Serving) -> None:
    """A silent or dead worker is not queried: the time-out here is longer than the test's."""
    here = Worker("decode-0", SilentEngine(Role.DECODE), "here")
    reports = [
        WorkerReport(id=f"decode-{place}", address="", state=state, role=Role.DECODE, worker=here, last_decision="why")
        for place, state in enumerate((WorkerState.SILENT, WorkerState.DEAD))
    ]
    snapshots = await snapshot_workers(reports, patience_s=60)
    assert [snapshot.state for snapshot in snapshots] == [WorkerState.SILENT, WorkerState.DEAD]
    served = await serve(workers=ChangeableWorkers(reports))
    silent, dead = (await served.status())["workers"]
    assert (silent["last_decision"], dead["last_decision"]) == ("why", "why")
    assert "groups_running" not in silent
    assert dead["groups_running"] == 0


async def test_a_worker_that_is_being_drained_is_shown_as_draining(serve: Serving) -> None:
    worker = Worker("decode-0", FiguresEngine(Role.DECODE, DECODE_STATS), "here")
    report = WorkerReport(id="decode-0", address="here", state=WorkerState.DRAINING, role=Role.DECODE, worker=worker)
    served = await serve(workers=ChangeableWorkers([report]))
    (shown,) = (await served.status())["workers"]
    assert (shown["state"], shown["pulls_open"]) == ("draining", 1)
    assert (await served.http.get("/health")).status_code == 200
    assert_error(await served.http.get("/ready"), status=503, retry_after="2", code="no_worker")


@pytest.mark.slow
@pytest.mark.parametrize("state", [WorkerState.STARTING, WorkerState.SILENT, WorkerState.DEAD])
async def test_a_server_is_as_healthy_as_the_workers_that_generate(serve: Serving, state: WorkerState) -> None:
    decode = Worker("decode-0", FiguresEngine(Role.DECODE, DECODE_STATS), "here")
    prefill = Worker("prefill-0", FiguresEngine(Role.PREFILL, PREFILL_STATS), "here")
    down = WorkerReport(id="decode-0", address="here", state=state, role=Role.DECODE, worker=decode)
    workers = ChangeableWorkers([down, ready(prefill)])
    served = await serve(workers=workers)
    assert await health(served) == ProbeStatuses(health=200 if state is WorkerState.STARTING else 503, ready=503)
    workers.listed.append(ready(Worker("decode-1", SilentEngine(Role.DECODE), "there")))  # in a long step
    assert await health(served) == ProbeStatuses(health=200, ready=200)
    workers.listed = []
    assert await health(served) == ProbeStatuses(health=503, ready=503)
    workers.listed = [ready(prefill)]  # without any other worker, it generates too
    assert await health(served) == ProbeStatuses(health=200, ready=200)


async def test_a_server_can_start_before_its_workers(serve: Serving) -> None:
    served = await serve(engine=EngineWithoutWorkers(), workers=[])
    assert await health(served) == ProbeStatuses(health=503, ready=503)
    assert (await served.status())["workers"] == []
    assert (await served.http.get("/metrics")).status_code == 200
    for response in (await served.chat(), await served.complete(stream=True), await served.http.get("/v1/models")):
        assert_error(response, status=503, retry_after="2", code="no_worker")


async def test_the_limits_are_the_limits_of_the_present_workers(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine())
    served.engine.info = msgspec.structs.replace(served.engine.info, max_model_len=10, vocab_size=300)
    assert (await served.http.get("/v1/models")).json()["data"][0]["max_model_len"] == 10
    assert (await served.complete("a" * 20)).json()["error"]["code"] == "context_length_exceeded"
    assert "0 to 299" in (await served.complete([300])).json()["error"]["message"]


async def test_the_model_is_listed_with_its_length(served: Served) -> None:
    (model,) = (await served.openai.models.list()).data
    assert model.id == MODEL
    assert model.object == "model"
    assert (await served.http.get("/v1/models")).json()["data"][0]["max_model_len"] == 4096
    assert await served.openai.models.retrieve(MODEL) == model


async def test_the_load_is_the_number_of_open_groups(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(gated=True))
    assert (await served.http.get("/load")).json() == {"server_load": 0}
    answer = await served.engine.start_request(served.complete(["a", "b"]))
    assert (await served.http.get("/load")).json() == {"server_load": 2}
    served.engine.go()
    await answer


async def test_healthy_and_ready(served: Served) -> None:
    assert (await served.http.get("/health")).status_code == 200
    assert (await served.http.get("/ready")).status_code == 200


async def test_version_is_that_of_the_package(served: Served) -> None:
    assert (await served.http.get("/version")).json() == {"version": version("motet")}


async def test_drain_lets_running_groups_finish_and_takes_no_new_ones(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(gated=True))
    running = await served.engine.start_request(served.chat())

    assert (await served.http.post("/drain")).json() == {"draining": True, "groups_open": 1}
    assert (await served.http.get("/health")).status_code == 200
    for response in (await served.http.get("/ready"), await served.chat(), await served.complete(stream=True)):
        assert_error(response, status=503, retry_after="1", code="draining")
    assert (await served.http.get("/status")).json()["workers"][0]["state"] == "draining"

    served.engine.go(20)
    assert (await running).json()["choices"][0]["message"]["content"] == "hello 0"
    await served.until_empty()
