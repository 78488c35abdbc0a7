"""The results of `bench.rollout`: tables and targets."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.program.report import LEFT, Bound, Cells, Table, Target, table
from bench.rollout.timed_updates import UpdateCost
from bench.rollout.trainer import LogprobMismatch

MIN_SPEED, MAX_DISTANCE = 1.3, 1.1
"""Motet's tokens/s divided by vLLM's, and Motet's distance from the trainer divided by vLLM's."""
MAX_SILENT_S = 1.0
FLOAT32_MEAN = 1e-4
"""Distance in nats. Rounding in another order gives a tenth of it."""


@dataclass(frozen=True)
class ServedBatch:
    """The speed of one batch on one server."""

    server: str
    dtype: str
    taken_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class ComparedLogprobs:
    server: str
    dtype: str
    after: str
    """Moment of the comparison: `start`, `stale` for answers under older weights than the trainer's, or the way of an
    update."""
    rounded: bool
    """True if the trainer computed with weights rounded to bf16."""
    mismatch: LogprobMismatch

    def cells(self) -> Cells:
        return [
            ("server", self.server, LEFT),
            ("dtype", self.dtype, LEFT),
            ("after", self.after, LEFT),
            ("trainer", "rounded" if self.rounded else "float32", LEFT),
            ("mean", self.mismatch.mean, ".6f"),
            ("p99", self.mismatch.p99, ".6f"),
            ("tokens", self.mismatch.tokens, ""),
        ]


@dataclass
class RolloutResults:
    served: list[ServedBatch] = field(default_factory=list)
    mismatches: list[ComparedLogprobs] = field(default_factory=list)
    updates: dict[str, UpdateCost] = field(default_factory=dict)
    """Costs of updates by way and dtype."""
    train_s: float = 0.0
    """Seconds of a forward and backward pass over the entire batch."""

    def compared(self, server: str, dtype: str, after: str, rounded: bool, mismatch: LogprobMismatch) -> None:
        self.mismatches.append(ComparedLogprobs(server, dtype, after, rounded, mismatch))

    def speed(self, server: str, dtype: str) -> float | None:
        speeds = (batch.tokens_per_s for batch in self.served if (batch.server, batch.dtype) == (server, dtype))
        return next(speeds, None)

    def mean(self, server: str, dtype: str, after: str = "start") -> float | None:
        """Returns the mean distance from a trainer with the same weights as the server."""
        key = (server, dtype, after, dtype == "bfloat16")
        for compared in self.mismatches:
            if (compared.server, compared.dtype, compared.after, compared.rounded) == key:
                return compared.mismatch.mean
        return None

    def share(self, batch: ServedBatch) -> float:
        """Returns the share of generation in a GRPO step. A trainer's own `generate` needs no update."""
        updates_s = [update.taken_s for name, update in self.updates.items() if name.endswith(batch.dtype)]
        update_s = min(updates_s, default=0.0) if batch.server == "Motet" else 0.0
        return batch.taken_s / (batch.taken_s + self.train_s + update_s)


def tables(results: RolloutResults) -> Iterator[Table]:
    yield table((batch_cells(batch, results) for batch in results.served), title="rollouts")
    yield table((update_cells(name, update) for name, update in results.updates.items()), title="updates")
    compared = (compared.cells() for compared in results.mismatches)
    yield table(compared, title="|log p(rollout) - log p(trainer)|, nats")


def batch_cells(batch: ServedBatch, results: RolloutResults) -> Cells:
    return [
        ("server", batch.server, LEFT),
        ("dtype", batch.dtype, LEFT),
        ("batch s", batch.taken_s, ".1f"),
        ("tokens/s", batch.tokens_per_s, ".0f"),
        ("of a GRPO step", results.share(batch), ".0%"),
    ]


def update_cells(name: str, update: UpdateCost) -> Cells:
    return [
        ("way, dtype", name, LEFT),
        ("taken s", update.taken_s, ".2f"),
        ("longest pause s", update.silent_s, ".2f"),
        ("usual pause s", update.usual_s, ".2f"),
    ]


def targets(results: RolloutResults) -> list[Target]:
    """Returns the targets. A figure that was not measured misses its target."""
    faster = ratio(results.speed("Motet", "bfloat16"), results.speed("vLLM", "bfloat16"))
    closer = ratio(results.mean("Motet", "bfloat16"), results.mean("vLLM", "bfloat16"))
    ways = dict.fromkeys(name.partition(", ")[0] for name in results.updates)
    return [
        Target("tokens/s / vLLM's, bf16", faster, MIN_SPEED, Bound.AT_LEAST),
        Target("mismatch / vLLM's, bf16", closer, MAX_DISTANCE),
        *(
            Target(
                f"mismatch in float32 after {after}, in 0.0001 nats",
                ratio(results.mean("Motet", "float32", after), FLOAT32_MEAN),
                1.0,
            )
            for after in ("start", *ways)
        ),
        *(
            Target(f"seconds without a token, {name}", update.silent_s, MAX_SILENT_S)
            for name, update in results.updates.items()
        ),
    ]


def ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
