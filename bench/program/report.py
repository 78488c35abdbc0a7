"""Prints the results of a benchmark: machine, versions, command, tables for people, targets, and JSON on the last line.

A table is made from rows of cells, and each cell has its heading, its value and its format together:

    table([("n", row.n, ""), ("total s", row.total_s, ".2f")] for row in rows)

The module imports nothing but the standard library, because `bench.gpu` runs where nothing can be installed.
"""

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path

from motet import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "uvicorn")
LEFT = "<"
MISSING = "-"

Cells = Sequence[tuple[str, object, str]]
"""One row of a table: heading, value and format of each cell. The format `<` aligns a column left, all others right.
The value None is printed as a dash."""


class Bound(StrEnum):
    AT_MOST = "at most"
    AT_LEAST = "at least"


@dataclass(frozen=True)
class Target:
    """A figure and its limit: a maximum, or a minimum (`Bound.AT_LEAST`)."""

    what: str
    value: float | None
    """The figure. None if it was not measured, which misses the target."""
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


@dataclass(frozen=True)
class Table:
    """A table whose cells are formatted. `str` aligns its columns."""

    headings: Sequence[str]
    """Headings of the columns. A heading can have several lines."""
    aligned_left: Sequence[bool]
    rows: Sequence[Sequence[str]]
    title: str | None = None

    def __str__(self) -> str:
        height = max((heading.count("\n") + 1 for heading in self.headings), default=0)
        heads = [_lines(heading, height) for heading in self.headings]
        lines = [*zip(*heads, strict=True), *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        aligned = ["  ".join(map(_align, line, widths, self.aligned_left)).rstrip() for line in lines]
        return "\n".join(aligned if self.title is None else [self.title, *aligned])


def table(rows: Iterable[Cells], *, title: str | None = None) -> Table:
    """Returns a table with the headings of the first row. All rows must have the same headings."""
    rows = list(rows)
    columns = [(heading, form == LEFT) for heading, _, form in rows[0]] if rows else []
    for row in rows:
        if [(heading, form == LEFT) for heading, _, form in row] != columns:
            raise ValueError(f"a row has the headings {[cell[0] for cell in row]}, the first has {columns}")
    texts = [[MISSING if value is None else format(value, form) for _, value, form in row] for row in rows]
    return Table([heading for heading, _ in columns], [left for _, left in columns], texts, title)


def labelled(values: Mapping[str, object]) -> list[str]:
    """Returns a line for each value, with its name in front."""
    return [f"{name:16} {value}" for name, value in values.items()]


def machine(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Returns the machine, the versions and the command of a measurement. Figures mean nothing without them."""
    return {
        "cpu": cpu_name(),
        "cores": str(len(os.sched_getaffinity(0))),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load average": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "motet": __version__,
        **{package: version(package) for package in packages},
        "command": " ".join(sys.orig_argv),
    }


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def print_report(
    record: Mapping[str, object],
    *shown: Table | str,
    conditions: Mapping[str, str],
    targets: Sequence[Target] = (),
    check: bool = False,
) -> int:
    """Prints the machine and other conditions, tables and lines, the targets, and `record` as JSON on the last line.

    Returns the exit code of the benchmark: 1 if `check` is set and a target is missed, otherwise 0.
    """
    for line in (*labelled(conditions), *shown, *(target.line() for target in targets)):
        print(line)
    print(json_of(record, conditions, targets))
    return int(check and not all(target.met for target in targets))


def json_of(record: Mapping[str, object], conditions: Mapping[str, str], targets: Sequence[Target] = ()) -> str:
    """Returns the last line of a report."""
    return json.dumps({"machine": conditions, **record, "targets": [target.record() for target in targets]})


def _lines(heading: str, height: int) -> list[str]:
    lines = heading.split("\n")
    return [*lines, *[""] * (height - len(lines))]


def _align(text: str, width: int, left: bool) -> str:
    return text.ljust(width) if left else text.rjust(width)
