"""What operators ask: is it alive, does it take work, what does it do, and please take no more."""

from importlib.metadata import version

import msgspec
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from motet.api.json_body import json_response
from motet.api.service import Service
from motet.api.status import PATIENCE_S, server_status
from motet.api.workers import Seen, look, needed
from motet.engines.base import WorkerState
from motet.errors import DrainingError, EngineDiedError, NoWorkerError
from motet.metrics.scraped import EngineSample, Scrape

HEALTH_PATIENCE_S = 0.5
"""How long a health check waits for an engine to finish its step."""


class Health(msgspec.Struct, frozen=True):
    status: str


class Version(msgspec.Struct, frozen=True):
    version: str


class Draining(msgspec.Struct, frozen=True):
    draining: bool
    groups_open: int


def admin_router(service: Service) -> APIRouter:
    router = APIRouter()
    motet_version = version("motet")

    @router.get("/health")
    async def health() -> Response:
        """200 while an engine lives that can answer, draining or not, or is being started again. A gateway is well
        without workers: they are others' to start."""
        workers = await _needed(service)
        lives = any(one.alive or one.report.state is WorkerState.STARTING for one in workers)
        if not lives and service.membership is None:
            raise EngineDiedError("The engine is not running.")
        return json_response(Health("ok"))

    @router.get("/ready")
    async def ready() -> Response:
        """200 while new groups are taken."""
        if service.admission.draining:
            raise DrainingError("The server is draining and takes no new requests.")
        if all(seen.report.state is not WorkerState.READY for seen in await _living(service)):
            raise NoWorkerError("No worker takes new requests at this moment: they are being drained.")
        return json_response(Health("ready"))

    @router.get("/version")
    async def get_version() -> Response:
        return json_response(Version(motet_version))

    @router.get("/status")
    async def status() -> Response:
        return json_response(await server_status(service, motet_version))

    @router.get("/metrics")
    async def metrics() -> Response:
        text = service.metrics.exposition(
            await _scrape(service), models=service.model_names, waiting=service.admission.waiting
        )
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    @router.post("/drain")
    async def drain() -> Response:
        """No new groups from now on; those that run finish, and then the server ends."""
        service.start_drain()
        return json_response(Draining(True, service.admission.open))

    return router


async def _scrape(service: Service) -> Scrape:
    """Figures of other servers are theirs to publish."""
    workers = await look(
        service.workers.reports(), patience_s=PATIENCE_S, draining=service.admission.draining, local_only=True
    )
    return Scrape(
        engines=[
            EngineSample(seen.report.id, seen.info, seen.stats)
            for seen in workers
            if seen.info is not None and seen.report.worker is not None and seen.report.worker.local
        ],
        routing=service.figures(),
        states={(seen.report.id, state.value): seen.state is state for seen in workers for state in WorkerState},
    )


async def _needed(service: Service) -> list[Seen]:
    """The workers without which the server is of no use. A dead engine says so at once; one that takes longer to answer
    is busy with a long step, and alive. Of servers elsewhere their keepers know."""
    return await look(needed(service.workers.reports()), patience_s=HEALTH_PATIENCE_S, local_only=True)


async def _living(service: Service) -> list[Seen]:
    """Those of them that live; raises unless there is one."""
    living = [one for one in await _needed(service) if one.alive]
    if not living:
        raise EngineDiedError("The engine is not running.")
    return living
