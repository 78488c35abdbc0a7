"""What a benchmark promises: a figure and the limit that it has to keep."""

from dataclasses import asdict, dataclass
from enum import StrEnum


class Bound(StrEnum):
    AT_MOST = "at most"
    AT_LEAST = "at least"


@dataclass(frozen=True)
class Floor:
    what: str
    value: float | None
    """None: it was not measured, which is no way to meet it."""
    limit: float
    bound: Bound = Bound.AT_MOST

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value <= self.limit if self.bound is Bound.AT_MOST else self.value >= self.limit

    def line(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:.2f}"
        return f"{'met' if self.met else 'MISSED':6} {self.what}: {value}, {self.bound} {self.limit:.2f}"

    def record(self) -> dict[str, object]:
        return asdict(self) | {"met": self.met}
