"""What a replica tells Serve of its load, by which there come to be more or fewer."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from motet.config import EngineConfig
from motet.deploy.ray.scaling import CHOICES, FULLNESS, PROMPTS
from motet.types import EngineStats, Role
from tests.deploy.dying import DEAD, DyingEngine, Starter
from tests.deploy.ray.directories import FakeDirectory
from tests.deploy.ray.workers import QUICK, RunningWorker

pytestmark = pytest.mark.anyio

STATS = EngineStats(groups_running=2, choices_running=8, choices_waiting=4, prompt_tokens=100, blocks_total=10)
LOAD = {CHOICES: 12.0, PROMPTS: 2.0, FULLNESS: 8 / 256}


class AskedEngine(DyingEngine):
    """Has so much to do, or is in a step that takes long."""

    told: EngineStats | None = STATS

    async def stats(self) -> EngineStats:
        if self.death is not None:
            raise self.death
        if self.told is None:
            await asyncio.Event().wait()
        return self.told or STATS


class Asked(Starter):
    def __init__(self) -> None:
        super().__init__()
        self.asked = AskedEngine()

    async def __call__(self, config: EngineConfig) -> DyingEngine:
        return self.asked


def running(folder: Path, starter: Asked) -> RunningWorker:
    return RunningWorker(folder, FakeDirectory(), Role.BOTH, starter=starter, limits=replace(QUICK, tell_s=0.05))


async def test_a_replica_tells_what_its_engine_has(folder: Path) -> None:
    starter = Asked()
    async with running(folder, starter) as one:
        assert await one.worker.load() == LOAD
        starter.asked.told = EngineStats(prompt_tokens=100, blocks_total=10)
        assert await one.worker.load() == {CHOICES: 0.0, PROMPTS: 0.0, FULLNESS: 0.0}


async def test_a_replica_in_a_long_step_has_the_load_that_it_had(folder: Path) -> None:
    """Without a word from it Serve would take it to have none, and end the one that has most to do."""
    starter = Asked()
    async with running(folder, starter) as one:
        assert await one.worker.load() == LOAD
        starter.asked.told = None
        assert await one.worker.load() == LOAD


async def test_a_replica_whose_engine_is_lost_does_not_fail(folder: Path) -> None:
    starter = Asked()
    async with running(folder, starter) as one:
        starter.asked.death = DEAD
        assert await one.worker.load() == {}
