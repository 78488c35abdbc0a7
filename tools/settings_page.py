"""Writes docs/settings.md from the declarations in `motet.settings.server_config`.

Run: python tools/settings_page.py          writes the page
     python tools/settings_page.py --check  fails if the page differs from what would be written
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from motet.settings.declaration import Declaration, Panel, ServerCommand
from motet.settings.server_config import SETTINGS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
HEAD = """\
# Settings

Every setting of `motet serve`, `motet gateway` and `motet ray`. This page is written from the declarations in
`src/motet/settings/server_config.py` by `python tools/settings_page.py`.

A setting has its default, unless the TOML file (`--config FILE`, or `MOTET_CONFIG`), the environment or the flag sets
it; a later one of these wins. The server prints each value with its source when it starts. The file uses the setting's
name (`max_num_seqs = 64`), the environment `MOTET_` and the name in capitals (`MOTET_MAX_NUM_SEQS=64`; lists with
commas). Names that no command knows and values out of range are refused (exit code 2). A command ignores settings that
only another one has, so commands may share a file and an environment. Models are kept in `MOTET_CACHE_DIR`
(`~/.cache/motet`).
"""


def page() -> str:
    """Returns the text of the page."""
    return "\n".join([HEAD, *(line for panel in Panel for line in section(panel))])


def section(panel: Panel) -> Iterator[str]:
    """Yields the lines of one panel's table."""
    yield f"## {panel}\n"
    yield "| name | flag | variable | default | range | commands | meaning |"
    yield "|---|---|---|---|---|---|---|"
    for declared in SETTINGS.values():
        if declared.panel is panel:
            yield f"| {' | '.join(cells(declared))} |"
    yield ""


def cells(declared: Declaration) -> list[str]:
    every = set(declared.commands) == set(ServerCommand)
    return [
        f"`{declared.name}`",
        f"`{declared.flag}`",
        f"`{declared.variable}`",
        declared.shown_default,
        declared.range or declared.must,
        "all" if every else ", ".join(declared.commands),
        declared.help,
    ]


def main() -> int:
    if "--check" in sys.argv[1:]:
        if PAGE.read_text() == page():
            return 0
        print(f"{PAGE.name} differs from the declarations: run python tools/settings_page.py", file=sys.stderr)
        return 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
