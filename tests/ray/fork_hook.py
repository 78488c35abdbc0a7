"""Lets replicas fork their engines. Ray calls `fork_engines` in each of its worker processes, before Motet is
imported."""

import os
from asyncio.subprocess import Process
from pathlib import Path

from motet.engines.native import spawn as native
from motet.engines.native.protocol import Launch
from motet.settings.server_config import environment

ROOT = Path(__file__).parents[2]
AT = "TESTS_FORK_ENGINES_AT"


def environ_of(socket: str) -> dict[str, str]:
    """Returns the environment of a cluster whose engines are forked by the process that listens at `socket`."""
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), environment().get("PYTHONPATH")))),
        "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": f"{__name__}.{fork_engines.__name__}",
        AT: socket,
    }


def fork_engines() -> None:
    native.spawn = forked


async def forked(launch: Launch) -> Process:
    from tests.ray.engines import Engines  # only replicas need it

    return await Engines(environment()[AT]).spawn(launch)
