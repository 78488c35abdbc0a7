"""What a gateway learns from its workers before it can serve: that one is there that decodes, and its tokenizer."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from motet.deploy.gateway import Gateway
from motet.engines.base import Worker
from motet.engines.remote import EngineServer
from motet.errors import MotetError, StartupError
from motet.routing.candidate import Work
from motet.routing.fleet import Fleet
from motet.types import Role

logger = logging.getLogger(__name__)

TOKENIZER_TIMEOUT_S = 30.0


async def decoding_workers(gateway: Gateway, *, timeout_s: float) -> list[Worker]:
    """Waits for the first, and until all have been asked. Raises StartupError that says how each of them is."""
    fleet = gateway.router.fleet
    known = ", ".join(member.id for member in fleet.members) or "none is named yet"
    logger.info("waiting for a worker that decodes, for %g s at most: %s", timeout_s, known)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(gateway.watch())
        try:
            async with asyncio.timeout(timeout_s):
                await gateway.looked()
                while not (found := _decoding(fleet)):
                    await fleet.changed()
        except TimeoutError:
            found = []
        finally:
            watching.cancel()
    if not found:
        said = "".join(
            f"\n  {member.id} ({member.address}) is {member.state}: {member.note}" for member in fleet.members
        )
        raise StartupError(f"no worker that decodes was there within {timeout_s:g} s{said or '; none was named'}")
    return found


async def fetch_tokenizer(workers: Sequence[Worker], *, server_at: Callable[[str], EngineServer]) -> dict[str, bytes]:
    """The files of the first of them that hands them out. Raises StartupError."""
    failures = []
    for worker in workers:
        try:
            async with asyncio.timeout(TOKENIZER_TIMEOUT_S):
                return await server_at(worker.address).tokenizer()
        except TimeoutError:
            failures.append(f"{worker.id} did not send it within {TOKENIZER_TIMEOUT_S:g} s")
        except MotetError as error:
            failures.append(error.message)
    raise StartupError(f"no worker hands out its tokenizer, give --tokenizer: {'; '.join(failures)}")


def _decoding(fleet: Fleet) -> list[Worker]:
    ready = [member for member in fleet.ready(Work.GENERATE) if member.role is not Role.PREFILL]
    return [member.worker for member in ready if member.worker is not None]
