"""Prints a benchmark's results: machine and versions, tables for people, floors, and JSON on the last line."""

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

PACKAGES = ("motet", "torch", "transformers", "tokenizers", "uvicorn")
PRINTED_WIDTH = 160
"""Width of tables if standard output is not a terminal."""


class Bound(StrEnum):
    AT_MOST = "at most"
    AT_LEAST = "at least"


@dataclass(frozen=True)
class Floor:
    """A figure and the limit that a benchmark promises for it."""

    what: str
    value: float | None
    """The figure; None if it was not measured, and then the floor is missed."""
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


def machine() -> dict[str, str]:
    """Returns the machine, the versions and the command of a measurement; without them figures mean nothing."""
    return {
        "cpu": cpu_name(),
        "cores": str(len(os.sched_getaffinity(0))),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load average": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        **{package: version(package) for package in PACKAGES},
        "command": " ".join(sys.orig_argv),
    }


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[object]], *, title: str | None = None) -> Table:
    """`columns`: the head of each, and the format of its values. The format `<` aligns them left, any other right. None
    is shown as a dash."""
    made = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for head, form in columns:
        made.add_column(head, justify="left" if form == "<" else "right")
    for row in rows:
        shown = zip(row, columns, strict=True)
        made.add_row(*("-" if value is None else format(value, form) for value, (_, form) in shown))
    return made


def tell(
    record: Mapping[str, object],
    *shown: Table | str,
    about: Mapping[str, str],
    floors: Sequence[Floor] = (),
    check: bool = False,
) -> int:
    """Prints `about` (the machine and other conditions), `shown`, the floors, and on the last line `record` as JSON.
    Returns the exit code: 1 if `check` is set and a floor is missed."""
    console = Console(width=None if sys.stdout.isatty() else PRINTED_WIDTH)
    for name, value in about.items():
        console.print(f"{name:16} {value}", highlight=False, soft_wrap=True)
    for one in shown:
        console.print(one, highlight=False, soft_wrap=isinstance(one, str))
    for floor in floors:
        console.print(floor.line(), highlight=False, soft_wrap=True)
    print(json.dumps({"machine": about, **record, "floors": [floor.record() for floor in floors]}))
    return int(check and not all(floor.met for floor in floors))
