"""docs/settings.md and shorter tables elsewhere agree with the declarations of settings."""

import re
from pathlib import Path

import pytest

from motet.settings.server_config import SETTINGS
from tools.settings_page import PAGE, page

ROOT = Path(__file__).parents[2]
BY_FLAG = {declared.flag: declared for declared in SETTINGS.values()}
HEADER = "| flag | default | meaning |"
TABLES = [ROOT / "docs" / name for name in ("kv_events.md", "prefill_decode.md", "workers.md")]


def test_the_page_of_settings_follows_from_the_declarations() -> None:
    assert PAGE.read_text() == page(), "run python tools/settings_page.py"


@pytest.mark.parametrize("file", TABLES, ids=lambda file: file.name)
def test_tables_of_flags_have_the_defaults_that_are_declared(file: Path) -> None:
    rows = [
        row for table in file.read_text().split(HEADER)[1:] for row in table.strip().split("\n\n")[0].split("\n")[1:]
    ]
    assert rows
    for row in rows:
        flags, default, _ = re.split(r" *\| *", row.strip("| "), maxsplit=2)
        for flag in re.findall(r"`([^`]+)`", flags):
            assert BY_FLAG[flag].shown_default == default.strip("`"), flag


def test_every_table_of_flags_is_compared() -> None:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    assert [file for file in documents if HEADER in file.read_text()] == TABLES
