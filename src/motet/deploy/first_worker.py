"""What a gateway waits for before it serves: a worker that answers requests, and what model it has."""

import asyncio
import logging

from motet.api.served import Models
from motet.deploy.gateway import Gateway
from motet.engines.base import WorkerState
from motet.errors import StartupError
from motet.routing.candidate import Work
from motet.routing.fleet import Fleet
from motet.types import Role

logger = logging.getLogger(__name__)


async def first_models(gateway: Gateway, models: Models, *, timeout_s: float) -> list[str]:
    """Waits for the first such worker, and until all have been asked; returns the names of the models there are then.

    Raises StartupError that says how each of the workers is."""
    fleet = gateway.router.fleet
    known = ", ".join(member.id for member in fleet.members) or "none is named yet"
    logger.info("waiting for a worker that answers, for %g s at most: %s", timeout_s, known)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(gateway.watch())
        try:
            async with asyncio.timeout(timeout_s):
                await gateway.looked()
                while not _can_answer(fleet):
                    await fleet.changed()
        except TimeoutError:
            pass
        finally:
            watching.cancel()
    if not _can_answer(fleet):
        said = "".join(
            f"\n  {member.id} ({member.address}) is {member.state}: {member.note}" for member in fleet.members
        )
        raise StartupError(
            f"no worker that answers requests was there within {timeout_s:g} s{said or '; none was named'}"
        )
    return [model.name for model in models.all()]


def _can_answer(fleet: Fleet) -> bool:
    decoding = any(member.role is not Role.PREFILL for member in fleet.ready(Work.GENERATE))
    return decoding or any(member.text and member.state is WorkerState.READY for member in fleet.members)
