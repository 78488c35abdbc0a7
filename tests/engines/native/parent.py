"""The parent of an engine, which is busy for longer than an engine may be silent, and which a test may stop.

It reads the engine's settings, says the engine's pid, waits for a line, and says whether the engine has died.
"""

import asyncio
import sys
import time

import msgspec

from motet.config import EngineConfig
from motet.engines.native.client import NativeEngine
from motet.engines.native.spawn import Spawn
from tests.forked import ForkedForkingProcess


async def be_parent(config: EngineConfig, spawn: Spawn) -> None:
    native = await NativeEngine.start(config, spawn=spawn)
    busy_s, later_s = 1.5 * config.heartbeat_timeout_s, 0.6 * config.heartbeat_timeout_s
    time.sleep(busy_s)  # noqa: ASYNC251  nothing of this process goes on
    await native.stats()
    await asyncio.sleep(later_s)
    say(str(native.info.pid))
    await asyncio.to_thread(sys.stdin.readline)
    await native.stats()
    await asyncio.sleep(later_s)
    await native.close()
    say(str(native.died.is_set()))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    config = msgspec.json.decode(sys.stdin.readline(), type=EngineConfig)
    with ForkedForkingProcess() as forking:
        asyncio.run(be_parent(config, forking.spawn))
