"""The sources of metrics: a worker's figures, and a group whose steps happen at given times, with only the fields of a
choice that a record needs."""

from dataclasses import dataclass

from motet.engine_info import EngineInfo
from motet.metrics.engines import EngineSample
from motet.metrics.group_metrics import GroupMetrics
from motet.metrics.stats import EngineStats
from motet.testing.fake_engine import fake_info
from motet.types import FinishReason, Role

ENGINE = object()


def engine_sample(
    worker: str = "engine-0",
    stats: EngineStats | None = None,
    *,
    role: Role = Role.BOTH,
    engine: object = ENGINE,
    info: EngineInfo | None = None,
) -> EngineSample:
    """Returns the figures of a worker with an engine. `info` is None for a fake engine."""
    return EngineSample(worker=worker, role=role, engine=engine, info=info or fake_info(role=role), stats=stats)


@dataclass(frozen=True)
class ShownChoice:
    index: int
    finish: FinishReason | None


class TimedGroup:
    """A group with its `record` in the metrics of a model."""

    def __init__(self, metrics: GroupMetrics, num_choices: int, *, started_s: float = 0.0) -> None:
        self._now_s = started_s
        self._metrics = metrics
        self.num_first_steps = 0
        """Number of times that the record reported the first step."""
        self.record = metrics.group_opened(
            num_choices, clock=lambda: self._now_s, prompt_tokens=7, max_tokens=9, on_first=self._count_first_step
        )

    def step(self, choices: list[ShownChoice], now_s: float) -> None:
        self._now_s = now_s
        self.record.step(choices, any(choice.finish for choice in choices))

    def end(
        self, now_s: float, *, status: int = 200, tokens: dict[int, int] | None = None, queue_s: float = 0.0
    ) -> None:
        self._now_s = now_s
        self._metrics.group_ended(self.record, status=status, tokens=tokens or {}, queue_s=queue_s)

    def _count_first_step(self) -> None:
        self.num_first_steps += 1
