"""The parent of an engine, which a test can keep busy, stop and kill.

It reads the engine's settings, and prints the engine's pid as soon as nothing of the pipes is left on disk. The line
`busy` on its standard input blocks its event loop for longer than an engine may be silent. After every line it reads
the engine's figures, lets the liveness check run, and prints if the engine has died. At the end of its standard
input it closes the engine and prints that once more.
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
from motet.settings.engine_config import EngineConfig
from tests.forked import ForkedForkingProcess


async def be_parent(config: EngineConfig, spawn: Spawn) -> None:
    native = await NativeEngine.start(config, spawn=spawn)
    await asyncio.to_thread(wait_until_connected)
    print_line(str(native.info.pid))
    while order := await asyncio.to_thread(sys.stdin.readline):
        if order == "busy\n":
            time.sleep(1.5 * config.heartbeat_timeout_s)  # noqa: ASYNC251  nothing of this process goes on
        await native.stats()
        await asyncio.sleep(0.6 * config.heartbeat_timeout_s)
        print_line(str(native.died.is_set()))
    await native.close()
    print_line(str(native.died.is_set()))


def wait_until_connected() -> None:
    while any(Path(gettempdir()).glob(f"motet-{os.getpid()}-*")):
        time.sleep(0.05)


def print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    config = msgspec.json.decode(sys.stdin.readline(), type=EngineConfig)
    with ForkedForkingProcess() as forking:
        asyncio.run(be_parent(config, forking.spawn))
