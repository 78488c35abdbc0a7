"""Starting engines side by side: all or none, and what has begun is ended in peace."""

import asyncio

import pytest

from motet.config import EngineConfig
from motet.deploy.start import LocalEngine, start_engines
from motet.errors import StartupError

pytestmark = pytest.mark.anyio
CONFIGS = {name: EngineConfig(model_path="", model_name=name) for name in ("a", "b", "c")}


class SlowEndings:
    """Starts that never end by themselves, and need a while to clear up when they are cancelled, each a longer one."""

    def __init__(self, *, fails: str = "") -> None:
        self.begun: list[str] = []
        self.all_begun = asyncio.Event()
        self.cleared: list[str] = []
        self._fails = fails

    async def __call__(self, config: EngineConfig) -> LocalEngine:
        self.begun.append(config.model_name)
        if len(self.begun) == len(CONFIGS):
            self.all_begun.set()
        if config.model_name == self._fails:
            raise StartupError("no memory")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            for _ in range(len(self.begun) * list(CONFIGS).index(config.model_name)):
                await asyncio.sleep(0)
            self.cleared.append(config.model_name)
            raise
        raise AssertionError


async def test_a_start_that_is_cancelled_lets_every_engine_clear_up() -> None:
    starts = SlowEndings()
    starting = asyncio.create_task(start_engines(CONFIGS, starts))
    await starts.all_begun.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert starts.cleared == ["a", "b", "c"]


async def test_an_engine_that_cannot_start_ends_the_others() -> None:
    starts = SlowEndings(fails="b")
    with pytest.raises(StartupError, match="no memory"):
        await start_engines(CONFIGS, starts)
    assert starts.cleared == ["a", "c"]
