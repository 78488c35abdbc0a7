"""The parent of an engine, which a test may keep busy, stop and kill.

It reads the engine's settings, and says the engine's pid once nothing of the pipes is left on the disk. Told `busy`, it
keeps its loop from running for longer than an engine may be silent; told anything, it asks the engine for its figures
and lets a watcher look at it. It says whether the engine has died each time, and when its standard input ends.
"""

import asyncio
import os
import sys
import time
from pathlib import Path
from tempfile import gettempdir

import msgspec

from motet.engines.native.client import NativeEngine
from motet.engines.native.spawn import Spawn
from motet.settings.server_config import EngineConfig
from tests.forked import ForkedForkingProcess


async def be_parent(config: EngineConfig, spawn: Spawn) -> None:
    native = await NativeEngine.start(config, spawn=spawn)
    await asyncio.to_thread(wait_until_connected)
    say(str(native.info.pid))
    while order := await asyncio.to_thread(sys.stdin.readline):
        if order == "busy\n":
            time.sleep(1.5 * config.heartbeat_timeout_s)  # noqa: ASYNC251  nothing of this process goes on
        await native.stats()
        await asyncio.sleep(0.6 * config.heartbeat_timeout_s)
        say(str(native.died.is_set()))
    await native.close()
    say(str(native.died.is_set()))


def wait_until_connected() -> None:
    while any(Path(gettempdir()).glob(f"motet-{os.getpid()}-*")):
        time.sleep(0.05)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    config = msgspec.json.decode(sys.stdin.readline(), type=EngineConfig)
    with ForkedForkingProcess() as forking:
        asyncio.run(be_parent(config, forking.spawn))
