"""The operators' routes: health, readiness, status, metrics, and draining.

`/workers` lists the workers, adds and removes them, and kills the process of one. It is for operators only: the server
connects to the address of a worker that joins."""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Annotated

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import PlainTextResponse
from pydantic import Field

from motet import __version__
from motet.api.control_bodies import ControlBody, options_in
from motet.api.http.failure import invalid_value
from motet.api.http.routes import json_response, new_router
from motet.api.http.schema import Schema
from motet.api.service import WITHOUT_ENGINE, Membership, Service, WorkerSnapshot, snapshot_workers
from motet.engine import WorkerState
from motet.engine_info import EngineKind
from motet.errors import (
    DrainingError,
    EngineDiedError,
    ForbiddenError,
    NotFoundError,
    NoWorkerError,
    PausedError,
    RequestError,
)
from motet.metrics.batch_figures import BatchFigures
from motet.metrics.declare import MetricKind, declared_in, numbers
from motet.metrics.engines import EngineSample
from motet.metrics.prometheus import OPENMETRICS, Scrape
from motet.metrics.routing import RoutingFigures
from motet.metrics.stats import EngineStats
from motet.settings.named_worker import NamedWorker
from motet.settings.server_url import is_http_url, without_v1
from motet.system.machine import resident_bytes
from motet.types import Role

HEALTH_PATIENCE_S = 0.5
"""Time in seconds that a health check waits for an engine to finish its step."""
PATIENCE_S = 2.0
"""Time in seconds in which a worker must answer: longer than most steps."""
ID = re.compile(r"[A-Za-z0-9._:-]{1,100}")
"""Ids of workers, which appear in headers, in lists with commas and in paths."""

Figure = int | float | None
DrainTimeout = Annotated[float | None, Query(ge=0, allow_inf_nan=False)]


def admin_router(service: Service) -> APIRouter:
    router = new_router()

    @router.get("/health")
    @router.get("/live")  # Dynamo's name
    @router.get("/liveness")  # prime-rl's name
    @router.get("/health_generate")  # SGLang's name
    @router.get("/ping")  # SageMaker's name
    @router.post("/ping")
    async def health() -> Response:
        """Returns 200 while an engine is alive or restarts, also while the server drains. A gateway always returns
        200."""
        workers = await _needed(service)
        alive = any(snapshot.alive or snapshot.report.state is WorkerState.STARTING for snapshot in workers)
        if not alive and service.membership is None:
            raise EngineDiedError("The engine is not running.")
        return json_response({"status": "ok"})

    @router.get("/ready")
    @router.get("/health/ready")  # vLLM's name
    async def ready() -> Response:
        """Returns 200 while the server accepts new groups, also in a pause that is not longer than the settings allow:
        new groups wait, and trainers pause for seconds at each update."""
        await _check_ready(service)
        pause_s = _pause_s(service)
        return json_response({"status": "ready"} if pause_s is None else {"status": "paused", "paused_s": pause_s})

    @router.get("/load")
    async def load() -> Response:
        """Returns the number of open groups, in vLLM's shape."""
        return json_response({"server_load": service.admission.open})

    @router.get("/version")
    async def get_version() -> Response:
        return json_response({"version": __version__})

    @router.get("/status")
    async def status() -> Response:
        """Returns the state of every worker, with totals over the workers that answered and over routing. A total that
        does not apply to this deployment is 0."""
        return json_response(await _status(service))

    @router.get("/metrics", response_class=PlainTextResponse, responses={200: {"content": {OPENMETRICS: {}}}})
    async def metrics(accept: Annotated[str, Header(include_in_schema=False)] = "") -> Response:
        """Returns all metrics in Prometheus' text format, or as OpenMetrics if the reader accepts it."""
        scrape, tasks = await _scrape(service), len(asyncio.all_tasks())
        models = dict.fromkeys(model.parent or model.name for model in service.models().values())
        exposition = service.metrics.exposition(
            scrape, models=models, waiting=service.admission.waiting, tasks=tasks, accept=accept
        )
        return Response(exposition.body, headers={"content-type": exposition.content_type})

    @router.post("/drain")
    async def drain(body: ControlBody | None = None) -> Response:
        """Refuses new groups from now on. The server ends when all running groups have finished."""
        options_in(body, service)
        service.start_drain()
        return json_response({"draining": True, "groups_open": service.admission.open})

    return router


async def _status(service: Service) -> dict[str, object]:
    workers, models, routing = await snapshot_all(service), service.model_names, service.routing_figures()
    return {
        "model": next(iter(models), None),
        "models": models,
        "version": __version__,
        "admin_key": bool(service.config.admin_key),
        "workers": [worker_status(snapshot) for snapshot in workers],
        "clients": _clients(service, routing),
        "totals": _totals([snapshot.stats for snapshot in workers if snapshot.stats], routing),
    }


async def _check_ready(service: Service) -> None:
    if service.admission.draining:
        raise DrainingError("The server is draining and takes no new requests.")
    states = [snapshot.report.state for snapshot in await _needed(service) if snapshot.alive]
    if not states:
        raise EngineDiedError("The engine is not running.")
    if WorkerState.READY not in states:
        raise NoWorkerError("No worker takes new requests at this moment: they are being drained.")
    pause_s, max_s = _pause_s(service), service.config.max_ready_pause_s
    if pause_s is not None and max_s is not None and pause_s >= max_s:
        advice = "POST /resume or, while the server sleeps, POST /wake_up ends the pause."
        raise PausedError(f"The server has been paused for {pause_s:g} s (--max-ready-pause {max_s:g}). {advice}")


def _pause_s(service: Service) -> float | None:
    """Returns the duration of the present pause, rounded to milliseconds; None if there is no pause."""
    pause_s = service.control.engines.pause_s if service.control else None
    return None if pause_s is None else round(pause_s, 3)


async def _scrape(service: Service) -> Scrape:
    """Returns the figures of this server's own engines. Other servers publish the figures of their workers."""
    reports, draining, sampled_s = service.workers(), service.admission.draining, service.clock()
    workers = await snapshot_workers(reports, patience_s=PATIENCE_S, draining=draining, local_only=True)
    return Scrape(
        engines=[sample for snapshot in workers if (sample := _sample(snapshot)) is not None],
        sampled_s=sampled_s,
        routing=service.routing_figures(),
        batches=BatchFigures() if service.batches is None else service.batches.figures_now(),
        states={
            (snapshot.report.id, state.value): snapshot.state is state for snapshot in workers for state in WorkerState
        },
    )


def _sample(snapshot: WorkerSnapshot) -> EngineSample | None:
    """Returns the figures of a worker's engine; None for a worker on another server, or without an engine so far."""
    report = snapshot.report
    if report.worker is None or report.role is None or not report.worker.local:
        return None
    engine = report.worker.engine
    return EngineSample(worker=report.id, role=report.role, engine=engine, info=snapshot.info, stats=snapshot.stats)


async def _needed(service: Service) -> list[WorkerSnapshot]:
    """Returns the workers among which at least one must be alive: the workers that decode, or all if none does.

    A dead engine fails at once; an engine that answers late is alive, and in a long step. Workers on other servers are
    not queried: their keepers know their state."""
    reports = service.workers()
    decoding = [report for report in reports if report.role in (Role.DECODE, Role.BOTH)]
    return await snapshot_workers(decoding or reports, patience_s=HEALTH_PATIENCE_S, local_only=True)


class NewWorker(Schema):
    url: str
    role: Annotated[Role | None, Field(strict=False)] = None
    kind: Annotated[EngineKind | None, Field(strict=False)] = None
    id: str | None = None


def membership_router(service: Service) -> APIRouter:
    router = new_router("/workers")

    @router.get("")
    async def list_workers() -> Response:
        return json_response({"workers": [worker_status(snapshot) for snapshot in await snapshot_all(service)]})

    @router.post("", status_code=201)
    async def join(body: NewWorker) -> Response:
        id = await _membership(service).join(_named(body), body.id)
        return json_response({"id": id, "state": WorkerState.STARTING}, status=201)

    @router.delete("/{id}", status_code=202)
    async def leave(id: str, drain_timeout: DrainTimeout = None) -> Response:
        """Removes a worker. Its groups have `drain_timeout` seconds to finish."""
        drain_s = service.config.drain_timeout_s if drain_timeout is None else drain_timeout
        await _membership(service).leave(id, drain_s)
        return json_response({"id": id, "state": WorkerState.DRAINING}, status=202)

    @router.post("/{id}/drain", status_code=202)
    async def drain(id: str, body: ControlBody | None = None) -> Response:
        options_in(body, service)
        await _membership(service).drain(id)
        return json_response({"id": id, "state": WorkerState.DRAINING}, status=202)

    @router.post("/{id}/kill", status_code=202)
    async def kill(id: str, body: ControlBody | None = None) -> Response:
        """Kills the worker's process, to demonstrate the migration of its groups to other workers."""
        _check_admin_key(service)
        options_in(body, service)
        _kill_of(service, id)()
        return json_response({"id": id, "state": WorkerState.DEAD}, status=202)

    return router


def _kill_of(service: Service, id: str) -> Callable[[], None]:
    """Returns the method that kills the engine's process of a worker. Raises RequestError unless this server started it
    and it runs."""
    report = next((report for report in service.workers() if report.id == id), None)
    if report is None:
        raise NotFoundError(f"There is no worker {id!r}.", code="worker_not_found")
    if report.state in WITHOUT_ENGINE:
        why = f"has no engine at this moment: it is {report.state}"
        raise RequestError(f"Worker {id} {why}.", code="worker_not_running")
    if report.worker is None or report.worker.kill is None:
        why = "is not a process of this server, which can end only processes that it started"
        raise RequestError(f"The engine of worker {id} {why}.", code="worker_elsewhere")
    return report.worker.kill


def _membership(service: Service) -> Membership:
    """Returns the membership. Raises unless workers can be changed. `Gate` checks the admin key if there is one."""
    if service.membership is None:
        why = "workers can join a server that is started with `motet gateway`"
        raise NotFoundError(f"The workers of this server are fixed; {why}.", code="fixed_workers")
    _check_admin_key(service)
    return service.membership


def _check_admin_key(service: Service) -> None:
    """Raises ForbiddenError if the server has no admin key."""
    if not service.config.admin_key:
        raise ForbiddenError(
            "Without an admin key workers are not added, removed or killed, since the server would connect to any "
            "address that a client names. Start it with --admin-key and send that key.",
            code="admin_key_required",
        )


def _named(body: NewWorker) -> NamedWorker:
    """Returns the worker of a request. Raises RequestError for a URL or an id that is not valid."""
    if not is_http_url(body.url):
        raise invalid_value("url", f"{body.url!r} is not an address such as http://10.0.0.1:8000")
    if body.id is not None and ID.fullmatch(body.id) is None:
        raise invalid_value("id", f"{body.id!r}. Up to 100 letters, digits and . _ : - are allowed")
    return NamedWorker(without_v1(body.url), body.role, body.kind)


async def snapshot_all(service: Service) -> list[WorkerSnapshot]:
    return await snapshot_workers(service.workers(), patience_s=PATIENCE_S, draining=service.admission.draining)


def worker_status(snapshot: WorkerSnapshot) -> dict[str, object]:
    """Returns the facts about a worker, and the gauges of its engine. None means unknown."""
    report, info = snapshot.report, snapshot.info
    return {
        "id": report.id,
        "role": report.role,
        "state": snapshot.state,
        "pid": info.pid if info else None,
        "address": report.address,
        "kind": report.kind,
        "model": info.model if info else None,
        "weight_version": info.weight_version if info else None,
        "models": report.models,
        "adapters": info.adapters if info else (),
        "max_num_seqs": info.max_num_seqs if info else 0,
        "transfer": info.transfer if info else None,
        "transfer_backend": info.transfer_backend if info else None,
        "block_size": info.block_size if info else 0,
        "blocks_total": info.num_blocks if info else 0,
        **_machine_facts(snapshot),
        "resumable": report.resumable,
        "last_decision": report.last_decision,
        "note": report.note,
        **_figures(snapshot),
    }


def _machine_facts(snapshot: WorkerSnapshot) -> dict[str, object]:
    """Returns what the worker's engine uses of its machine. Fields that the engine does not report are null."""
    info, worker = snapshot.info, snapshot.report.worker
    local_pid = info.pid if info and worker is not None and worker.local else None
    return {
        "device": info.device or None if info else None,
        "kernels": info.kernels or None if info else None,
        "kernels_note": info.kernels_note or None if info else None,
        "kv_cache_bytes": info.num_blocks * info.bytes_per_block if info else 0,
        "kv_cache_reason": info.kv_cache_reason or None if info else None,
        "resident_bytes": None if local_pid is None else resident_bytes(local_pid),
    }


def _figures(snapshot: WorkerSnapshot) -> dict[str, Figure]:
    """Returns the gauges of the engine: none for a silent worker, and zeros for a worker without an engine."""
    if snapshot.state is WorkerState.SILENT:
        return {}
    stats = snapshot.stats or EngineStats()
    return {
        name: getattr(stats, name)
        for name, declared in declared_in(EngineStats)
        if declared.in_status and declared.kind is MetricKind.GAUGE
    }


def _clients(service: Service, routing: RoutingFigures) -> list[dict[str, object]]:
    """Returns the entries of `/status` about clients: what each holds, and what it waits for."""
    return [
        {
            "client": client,
            "share": service.rights(client).client_weight,
            "choices": choices,
            "blocks": routing.client_blocks[client],
            "choices_queued": routing.client_queued_choices[client],
        }
        for client, choices in routing.client_choices.items()
    ]


def _totals(stats: Sequence[EngineStats], routing: RoutingFigures) -> dict[str, Figure]:
    return {
        name: sum(sum(numbers(one, name, declared=declared).values()) for one in figures)
        for struct, figures in ((EngineStats, stats), (RoutingFigures, [routing]))
        for name, declared in declared_in(struct)
        if declared.in_status and declared.kind is MetricKind.COUNTER
    }
