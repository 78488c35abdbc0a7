"""Generates docs/settings.md from the declarations in `motet.settings.server_config`.

Run: python tools/settings_page.py          writes the page
     python tools/settings_page.py --check  fails if the page is out of date
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from motet.settings.declaration import Declaration, Panel, ServerCommand
from motet.settings.server_config import SETTINGS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
HEAD = """\
# Settings

This page lists every setting of `motet serve`, `motet gateway` and `motet ray`. `python tools/settings_page.py`
generates it from the declarations in `src/motet/settings`.

A setting has its default unless it is set in the TOML file (`--config FILE`, or `MOTET_CONFIG`), in the environment or
by its flag. Later sources in this list take precedence. At startup, a server prints the settings that differ from their
defaults, with their sources. In the file a setting has its name (`max_num_seqs = 64`). In the environment it has its
name in capitals after `MOTET_` (`MOTET_MAX_NUM_SEQS=64`); commas separate the items of a list. Unknown names and values
out of range are refused (exit code 2). A command ignores settings that only other commands have, so several commands
can share a file and an environment. Models are stored in `MOTET_CACHE_DIR` (`~/.cache/motet`).
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
        documented(declared, lambda one: one.shown_default),
        documented(declared, lambda one: one.range or one.must),
        "all" if every else ", ".join(declared.commands),
        documented(declared, lambda one: one.help),
    ]


def documented(declared: Declaration, text_of: Callable[[Declaration], str]) -> str:
    """Returns a text of the declaration, followed by the texts of commands that document it in another way."""
    texts = {command: text_of(declared.documented_for(command)) for command in declared.commands}
    others = [f"`motet {command}`: {text}" for command, text in texts.items() if text != text_of(declared)]
    return (" " if text_of(declared).endswith(".") else "; ").join([text_of(declared), *others])


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
