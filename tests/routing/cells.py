"""Scenes of two workers: one prefill and one decode worker, or two of one role."""

import asyncio
from dataclasses import dataclass

from motet.errors import MotetError
from motet.settings.server_config import CellConfig, Policy
from motet.testing.fake_engine import DuringPrefill
from motet.types import Role
from tests.routing.scene import ControlledPrefill, Scene


class CellScene(Scene):
    """One prefill and one decode worker. A group whose decode worker fails ends with it."""

    def __init__(
        self,
        *,
        during_prefill: DuringPrefill | None = None,
        gate: asyncio.Semaphore | None = None,
        fail_after: dict[int, MotetError] | None = None,
        cell: CellConfig | None = None,
        role: Role = Role.BOTH,
    ) -> None:
        super().__init__("prefill-0", "decode-0", limit=0, wait_s=0.0, cell=cell, role=role)
        self.prefill, self.decode = self.all
        self.prefill.during_prefill = during_prefill
        self.decode.scenario.gate = gate
        self.decode.scenario.fail_after = fail_after or {}


@dataclass(frozen=True)
class PerWorker:
    """Number of groups of each worker of a `PairScene`."""

    first: int
    second: int


class PairScene(Scene):
    """Two workers of one role. A group whose worker fails ends with it."""

    def __init__(
        self,
        role: str = "prefill",
        *,
        first: ControlledPrefill | None = None,
        second: ControlledPrefill | None = None,
        policy: Policy = Policy.KV,
    ) -> None:
        super().__init__(f"{role}-0", f"{role}-1", limit=0, wait_s=0.0, policy=policy, role=Role(role), now_s=0.0)
        self.first, self.second = self.all
        self.first.during_prefill, self.second.during_prefill = first, second

    @property
    def prefill_counts(self) -> PerWorker:
        return PerWorker(len(self.first.prefills), len(self.second.prefills))

    @property
    def groups(self) -> PerWorker:
        return PerWorker(len(self.first.requests), len(self.second.requests))
