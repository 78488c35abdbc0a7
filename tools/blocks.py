"""Lists the code blocks of the pages, and shows for each block how it is tested, or why it is not.

A block of commands (`sh`) or Python has a mark: an HTML comment on the line before it, which the rendered page does not
show.

    <!-- run: server -->          a test runs it against a server of the default model
    <!-- run: servers -->         a test runs it; the block starts its own servers
    <!-- run: trainer -->         a test runs it against a server with --rl, next to a model that is trained
    <!-- run: events -->          a test runs it against a server that publishes events, until it prints some
    <!-- run: POST /route -->     a test posts each JSON object of the block to this route
    <!-- run by FILE -->          that file, a test or a script of tests, runs it
    <!-- parsed: REASON -->       a test only parses its commands, because of the reason
    <!-- not run: REASON -->      nothing runs it, because of the reason

Every block names its language. Drawings and output are `text`, which needs no mark. Neither does data (`json`, `yaml`).
`tests/e2e/test_blocks.py` runs the blocks, and says what it replaces in them.

Run: python -m tools.blocks [--kind KIND]
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("sh", "python")
DATA = ("text", "json", "jsonl", "yaml", "toml", "ini")
WORLDS = ("server", "servers", "trainer", "events")
MARK = re.compile(r"\s*<!-- (run by|run|parsed|not run):? (.*?) -->\s*")


class Kind(StrEnum):
    RUN = "run"
    RUN_BY = "run by"
    PARSED = "parsed"
    NOT_RUN = "not run"
    DATA = "data"
    UNMARKED = "unmarked"


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    """Line of the first fence."""
    language: str
    text: str
    kind: Kind
    detail: str = ""
    """What follows the kind in the mark: a world, a file, or a reason."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """Returns the commands of a shell block, without comments. Continued lines are joined."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        lines = (re.sub(r"(^|\s)#\s.*", "", line).strip() for line in joined.splitlines())
        return [line for line in lines if line]

    def problems(self) -> Iterator[str]:
        if not self.language:
            yield "has no language: sh, python, text, json ..."
        elif self.language not in (*COMMANDS, *DATA):
            yield f"has an unknown language: {self.language}"
        elif self.kind is Kind.UNMARKED:
            yield "has no mark: tools/blocks.py describes the marks"
        elif self.kind is Kind.RUN and self.detail not in WORLDS and not self.detail.startswith("POST /"):
            yield f"has an unknown world: {self.detail}; there are {', '.join(WORLDS)}"
        elif self.kind is Kind.RUN_BY and not (ROOT / self.detail).is_file():
            yield f"names a file that does not exist: {self.detail}"


def pages() -> list[Path]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [*found, *sorted((ROOT / "examples").rglob("README.md"))]


def blocks_of(page: str, text: str) -> Iterator[Block]:
    """Yields the blocks of a page."""
    lines = iter(enumerate(text.splitlines(), 1))
    before = ""
    for number, line in lines:
        if opening := re.fullmatch(r"(\s*)```(\w*)", line):
            indent, language = len(opening[1]), opening[2]
            inside = []
            for _, part in lines:
                if part.strip() == "```":
                    break
                inside.append(part[indent:])
            kind, detail = kind_of(language, before)
            yield Block(page, number, language, "\n".join(inside) + "\n", kind, detail)
        if line.strip():
            before = line


def kind_of(language: str, before: str) -> tuple[Kind, str]:
    if mark := MARK.fullmatch(before):
        return Kind(mark[1]), mark[2]
    return (Kind.DATA if language in DATA else Kind.UNMARKED), ""


def all_blocks(paths: Sequence[Path] | None = None) -> list[Block]:
    found = pages() if paths is None else paths
    return list(chain.from_iterable(blocks_of(str(path.relative_to(ROOT)), path.read_text()) for path in found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=[str(kind) for kind in Kind], help="only blocks of this kind")
    arguments = parser.parse_args()
    blocks = all_blocks()
    for block in blocks:
        if arguments.kind in (None, str(block.kind)):
            first = block.text.partition("\n")[0]
            print(f"{block.place:36} {block.kind:9} {block.detail:44} {first[:60]}")
    counts = Counter(block.kind for block in blocks)
    print(f"{len(blocks)} blocks: " + ", ".join(f"{counts[kind]} {kind}" for kind in Kind if counts[kind]))
    problems = [f"{block.place} {problem}" for block in blocks for problem in block.problems()]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
