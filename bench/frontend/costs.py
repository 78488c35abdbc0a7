"""The results of `bench.frontend`: rows, targets and the report."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from bench.program.report import Cells, Target, print_report, table

MAX_CLIENTS = 64


@dataclass(frozen=True)
class ApiCost:
    """The cost of one load on one server."""

    us_per_token: float
    """CPU time of the API process, user and system."""
    tokens_per_s: float
    first_p50_ms: float
    first_p99_ms: float


def best_of(costs: Sequence[ApiCost]) -> ApiCost:
    """Returns the best of each figure."""
    return ApiCost(
        us_per_token=min(cost.us_per_token for cost in costs),
        tokens_per_s=max(cost.tokens_per_s for cost in costs),
        first_p50_ms=min(cost.first_p50_ms for cost in costs),
        first_p99_ms=min(cost.first_p99_ms for cost in costs),
    )


@dataclass(frozen=True)
class FrontendRow:
    """A load on Motet and, if it is streamed, on the bare application that sends the same bytes."""

    route: str
    n: int
    clients: int
    max_tokens: int
    motet: ApiCost
    bare: ApiCost | None

    @property
    def ratio(self) -> float | None:
        """Returns Motet's CPU time divided by the bare application's. Returns None if that was not measured, or 0."""
        return self.motet.us_per_token / self.bare.us_per_token if self.bare and self.bare.us_per_token else None

    def cells(self) -> Cells:
        return [
            ("route", self.route, "<"),
            ("n", self.n, ""),
            ("clients", self.clients, ""),
            ("tokens", self.max_tokens, ""),
            ("us per token", self.motet.us_per_token, ".2f"),
            ("bare", self.bare and self.bare.us_per_token, ".2f"),
            ("ratio", self.ratio, ".2f"),
            ("tokens/s", self.motet.tokens_per_s, ",.0f"),
            ("first p50 ms", self.motet.first_p50_ms, ".1f"),
            ("p99", self.motet.first_p99_ms, ".1f"),
            ("bare p99", self.bare and self.bare.first_p99_ms, ".1f"),
        ]


@dataclass(frozen=True)
class BurstGaps:
    """Times between the arrivals of two parts of a burst at the client."""

    number: int
    p50_ms: float
    p99_ms: float
    longest_ms: float

    @classmethod
    def of(cls, gaps_ms: Sequence[float]) -> "BurstGaps":
        return cls(len(gaps_ms), percentile(gaps_ms, 50), percentile(gaps_ms, 99), max(gaps_ms))


@dataclass(frozen=True)
class FrontendReport:
    machine: Mapping[str, str]
    streamed: Sequence[FrontendRow]
    not_streamed: Sequence[FrontendRow]
    """Rows of answers that are not streamed."""
    first: FrontendRow
    """The row with short answers, for the time to the first token."""
    request_us: float
    """CPU time of a request for one token."""
    burst: BurstGaps
    parts: Mapping[str, float] = field(default_factory=dict)
    """CPU microseconds per token of each part that is measured alone."""

    @property
    def targets(self) -> list[Target]:
        found = [
            Target(f"CPU per token / of bare ASGI, n=1, {row.clients} clients, {row.route}", row.ratio, 1.5)
            for row in self.streamed
            if (row.n, row.clients) == (1, MAX_CLIENTS)
        ]
        many = [row.motet.us_per_token for row in self.streamed if row.n == 64]
        found.append(Target("CPU microseconds per token, n=64", max(many, default=None), 3.0))
        found.append(
            Target(f"first token with {self.first.clients} clients, p99, ms", self.first.motet.first_p99_ms, 15.0)
        )
        found.append(Target("gap between two parts of a burst, p99, ms", self.burst.p99_ms, 20.0))
        return found

    def print(self, *, check: bool) -> int:
        return print_report(
            {name: value for name, value in asdict(self).items() if name != "machine"},
            table(row.cells() for row in (*self.streamed, *self.not_streamed, self.first)),
            f"a request for one token: {self.request_us:.0f} us",
            f"longest of {self.burst.number} gaps inside bursts: {self.burst.longest_ms:.2f} ms",
            *(f"{part}: {cost_us:.2f} us per token" for part, cost_us in self.parts.items()),
            conditions=self.machine,
            targets=self.targets,
            check=check,
        )


def percentile(values: Sequence[float], percent: int) -> float:
    """Returns the smallest value that is not exceeded by `percent` % of the values."""
    return sorted(values)[-(-percent * len(values) // 100) - 1]
