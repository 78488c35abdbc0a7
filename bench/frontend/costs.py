"""The results of `bench.frontend`: a table for people, a record for machines, and the floors."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from bench.program.report import Floor, Table, columns_table, tell

MOST_CLIENTS = 64


@dataclass(frozen=True)
class Cost:
    """What one load cost one server."""

    us_per_token: float
    """CPU time of the API process, user and system."""
    tokens_per_s: float
    first_p50_ms: float
    first_p99_ms: float


@dataclass(frozen=True)
class Row:
    """A load on Motet and, if it streams, on the bare application that sends the same bytes."""

    route: str
    n: int
    clients: int
    max_tokens: int
    motet: Cost
    bare: Cost | None

    @property
    def ratio(self) -> float | None:
        """Returns None if there is no bare one, or if it took too little time to measure."""
        return self.motet.us_per_token / self.bare.us_per_token if self.bare and self.bare.us_per_token else None


@dataclass(frozen=True)
class Gaps:
    """Times between the arrivals of two parts of a burst at the client."""

    number: int
    p50_ms: float
    p99_ms: float
    longest_ms: float

    @classmethod
    def of(cls, gaps_ms: Sequence[float]) -> "Gaps":
        return cls(len(gaps_ms), percentile(gaps_ms, 50), percentile(gaps_ms, 99), max(gaps_ms))


@dataclass(frozen=True)
class Report:
    machine: Mapping[str, str]
    streamed: Sequence[Row]
    whole: Sequence[Row]
    """Rows of answers that are not streamed."""
    first: Row
    """The row with short answers, for the time to the first token."""
    request_us: float
    """CPU time of a request for one token."""
    burst: Gaps
    parts: Mapping[str, float] = field(default_factory=dict)
    """CPU microseconds a token of each part measured alone."""

    @property
    def floors(self) -> list[Floor]:
        found = [
            Floor(f"CPU a token to that of bare ASGI, n=1, {row.clients} clients, {row.route}", row.ratio, 1.5)
            for row in self.streamed
            if (row.n, row.clients) == (1, MOST_CLIENTS)
        ]
        many = [row.motet.us_per_token for row in self.streamed if row.n == 64]
        found.append(Floor("CPU microseconds a token, n=64", max(many, default=None), 3.0))
        found.append(
            Floor(f"first token with {self.first.clients} clients, p99, ms", self.first.motet.first_p99_ms, 15.0)
        )
        found.append(Floor("gap between two parts of a burst, p99, ms", self.burst.p99_ms, 20.0))
        return found

    def tell(self, *, check: bool) -> int:
        return tell(
            {name: value for name, value in asdict(self).items() if name != "machine"},
            table_of([*self.streamed, *self.whole, self.first]),
            f"a request for one token: {self.request_us:.0f} us",
            f"longest of {self.burst.number} gaps inside bursts: {self.burst.longest_ms:.2f} ms",
            *(f"{part}: {cost_us:.2f} us a token" for part, cost_us in self.parts.items()),
            about=self.machine,
            floors=self.floors,
            check=check,
        )


def table_of(rows: Sequence[Row]) -> Table:
    heads = [("route", "<"), ("n", ""), ("clients", ""), ("tokens", ""), ("us a token", ".2f"), ("bare", ".2f")]
    heads += [("ratio", ".2f"), ("tokens/s", ",.0f"), ("first p50 ms", ".1f"), ("p99", ".1f"), ("bare p99", ".1f")]
    return columns_table(heads, map(cells_of, rows))


def cells_of(row: Row) -> Sequence[object]:
    motet, bare = row.motet, row.bare
    costs = (motet.us_per_token, bare and bare.us_per_token, row.ratio, motet.tokens_per_s)
    firsts = (motet.first_p50_ms, motet.first_p99_ms, bare and bare.first_p99_ms)
    return (row.route, row.n, row.clients, row.max_tokens, *costs, *firsts)


def percentile(values: Sequence[float], percent: int) -> float:
    """Returns the smallest value that `percent` % of the values do not exceed."""
    return sorted(values)[-(-percent * len(values) // 100) - 1]
