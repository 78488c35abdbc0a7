"""Makes the pictures of README.md and docs that are SVG: docs/pictures/*.svg.

The bars are made from figures of docs/log.md, and the animation from a recorded run (python -m tools.pictures.record).

Run: python -m tools.pictures          writes the pictures
     python -m tools.pictures --check  fails if a picture is out of date
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tools.pictures.architecture import architecture
from tools.pictures.bars import bars
from tools.pictures.kill import kill
from tools.pictures.logo import logo

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
PICTURES: Mapping[str, Callable[[], str]] = {"architecture": architecture, "bars": bars, "kill": kill, "logo": logo}


def outdated() -> list[str]:
    """Returns the names of the pictures whose files differ from what is made now."""
    files = {name: FOLDER / f"{name}.svg" for name in PICTURES}
    return [name for name, path in files.items() if not path.is_file() or path.read_text() != PICTURES[name]()]


def main() -> int:
    if "--check" in sys.argv[1:]:
        for name in (found := outdated()):
            print(f"docs/pictures/{name}.svg is out of date: run python -m tools.pictures", file=sys.stderr)
        return 1 if found else 0
    for name, make in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(make())
    return 0


if __name__ == "__main__":
    sys.exit(main())
