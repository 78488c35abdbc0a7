"""The figures of `bench.rollout`, as tables and floors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench.program.report import Bound, Floor, Table, columns_table
from bench.rollout.trainer import Mismatch
from bench.rollout.weight_updates import Update

FASTER, CLOSER = 1.3, 1.1
"""Our tokens/s and our distance, of vLLM's."""
MOST_SILENT_S = 1.0
FLOAT32_MEAN = 1e-4
"""Nats; rounding in another order gives a tenth of it."""


@dataclass(frozen=True)
class Served:
    """How fast a batch was written."""

    server: str
    dtype: str
    taken_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class Compared:
    server: str
    dtype: str
    after: str
    """`start`, `stale` for answers under older weights than the trainer's, or the way of an update."""
    rounded: bool
    """True if the trainer computed with weights rounded to bf16."""
    mismatch: Mismatch


@dataclass
class Results:
    served: list[Served] = field(default_factory=list)
    mismatches: list[Compared] = field(default_factory=list)
    updates: dict[str, Update] = field(default_factory=dict)
    """By way and dtype."""
    train_s: float = 0.0
    """Seconds of a forward and backward pass over the whole batch."""

    def compared(self, server: str, dtype: str, after: str, rounded: bool, mismatch: Mismatch) -> None:
        self.mismatches.append(Compared(server, dtype, after, rounded, mismatch))

    def speed(self, server: str, dtype: str) -> float | None:
        return next((one.tokens_per_s for one in self.served if (one.server, one.dtype) == (server, dtype)), None)

    def mean(self, server: str, dtype: str, after: str = "start") -> float | None:
        """Returns the mean distance from a trainer with the server's weights."""
        like = (server, dtype, after, dtype == "bfloat16")
        found = (one for one in self.mismatches if (one.server, one.dtype, one.after, one.rounded) == like)
        return next((one.mismatch.mean for one in found), None)

    def share(self, one: Served) -> float:
        """Returns the share of a GRPO step that is generation. A trainer's own `generate` needs no update."""
        own = [update.taken_s for name, update in self.updates.items() if name.endswith(one.dtype)]
        update_s = min(own, default=0.0) if one.server == "Motet" else 0.0
        return one.taken_s / (one.taken_s + self.train_s + update_s)


def tables(results: Results) -> Iterator[Table]:
    heads = [("server", "<"), ("dtype", "<"), ("batch s", ".1f"), ("tokens/s", ".0f"), ("of a GRPO step", ".0%")]
    rows = [(one.server, one.dtype, one.taken_s, one.tokens_per_s, results.share(one)) for one in results.served]
    yield columns_table(heads, rows, title="rollouts")
    heads = [("way, dtype", "<"), ("taken s", ".2f"), ("no token for s", ".2f"), ("usual s", ".2f")]
    updates = [(name, up.taken_s, up.silent_s, up.usual_s) for name, up in results.updates.items()]
    yield columns_table(heads, updates, title="updates")
    heads = [("server", "<"), ("dtype", "<"), ("after", "<"), ("trainer", "<")]
    heads += [("mean", ".6f"), ("p99", ".6f"), ("tokens", "")]
    yield columns_table(heads, map(cells_of, results.mismatches), title="|log p(rollout) - log p(trainer)|, nats")


def cells_of(one: Compared) -> Sequence[object]:
    away = one.mismatch
    weights = "rounded" if one.rounded else "float32"
    return (one.server, one.dtype, one.after, weights, away.mean, away.p99, away.tokens)


def floors(results: Results) -> list[Floor]:
    """Returns what Motet promises; a figure that was not measured misses its floor."""
    faster = ratio(results.speed("Motet", "bfloat16"), results.speed("vLLM", "bfloat16"))
    closer = ratio(results.mean("Motet", "bfloat16"), results.mean("vLLM", "bfloat16"))
    ways = dict.fromkeys(name.partition(", ")[0] for name in results.updates)
    return [
        Floor("tokens/s of vLLM's, bf16", faster, FASTER, Bound.AT_LEAST),
        Floor("mismatch of vLLM's, bf16", closer, CLOSER),
        *(
            Floor(
                f"mismatch in float32 after {after}, in 0.0001 nats",
                ratio(results.mean("Motet", "float32", after), FLOAT32_MEAN),
                1.0,
            )
            for after in ("start", *ways)
        ),
        *(
            Floor(f"seconds without a token, {name}", update.silent_s, MOST_SILENT_S)
            for name, update in results.updates.items()
        ),
    ]


def ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None
