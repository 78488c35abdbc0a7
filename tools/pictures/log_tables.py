"""Tables of docs/log.md, for pictures that show measured figures."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LOG = Path(__file__).resolve().parents[2] / "docs" / "log.md"


@dataclass(frozen=True)
class Entry:
    """An entry of the log."""

    date: str
    title: str
    text: str

    def rows(self, first_column: str) -> list[Mapping[str, str]]:
        """Returns the rows of the entry's first table that has `first_column` as its first column, by column."""
        lines = self.text.splitlines()
        start = next(at for at, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
        heads = cells(lines[start])
        rows: list[Mapping[str, str]] = []
        for line in lines[start + 2 :]:
            if not line.startswith("|"):
                break
            rows.append(dict(zip(heads, cells(line), strict=True)))
        return rows


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def entry(title: str) -> Entry:
    """Returns the newest entry whose title starts with `title`. Raises LookupError if there is none."""
    for found in re.finditer(r"^## (\S+): (.*)\n((?:(?!^## ).*\n?)*)", LOG.read_text(), re.M):
        if found[2].startswith(title):
            return Entry(found[1], found[2], found[3])
    raise LookupError(f"docs/log.md has no entry {title!r}")


def numbers(cell: str) -> list[float]:
    """Returns the numbers of a cell such as `0.48 / 0.56 s`."""
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", cell)]
