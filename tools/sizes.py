"""Checks that files and functions are small enough to read: fails if one is over the limit.

A file has at most 500 lines, a function 60. If a function is long because of its parameters (a command with one for
each flag), the line of its `def` gives the reason, `# sizes: <reason>`, and its lines count from the body on.

Run: python tools/sizes.py [--top N]
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "tools", "bench", "examples")

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
EXCUSE = "# sizes: "


@dataclass(frozen=True)
class Size:
    """One figure of one file or function."""

    where: str
    what: str
    value: int
    limit: int

    @property
    def over(self) -> bool:
        return self.value > self.limit


def measure(path: Path, *, name: str) -> Iterator[Size]:
    """Yields the sizes of a file and of every function in it."""
    text = path.read_text()
    lines = text.splitlines()
    yield Size(name, "lines", len(lines), MAX_FILE_LINES)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            where = f"{name}:{node.lineno} {node.name}"
            excused = EXCUSE in lines[node.lineno - 1]
            first_line = node.body[0].lineno if excused else node.lineno
            last_line = node.end_lineno or first_line
            yield Size(where, "function lines", last_line - first_line + 1, MAX_FUNCTION_LINES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top", type=int, default=0, help="also show the N largest of each kind")
    top = parser.parse_args().top
    sizes = [
        size
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for size in measure(path, name=str(path.relative_to(ROOT)))
    ]
    for what in ("lines", "function lines"):
        largest = sorted((s for s in sizes if s.what == what), key=lambda s: -s.value)
        for size in largest[:top]:
            print(f"{size.value:5} {what:14} {size.where}")
    too_large = [size for size in sizes if size.over]
    for size in too_large:
        print(f"{size.where}: {size.value} {size.what}, at most {size.limit}", file=sys.stderr)
    files = sum(s.what == "lines" for s in sizes)
    print(f"sizes: {files} files, {sum(s.value for s in sizes if s.what == 'lines')} lines, {len(too_large)} too large")
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
