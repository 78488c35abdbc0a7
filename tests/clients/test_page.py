"""docs/clients.md and the recordings have the tested versions."""

import json
from pathlib import Path

import pytest

from tests.clients.installed import (
    AIDER,
    CLAUDE_CODE,
    CLIENTS,
    CODEX,
    INSPECT_PROVIDER,
    LM_EVAL_SCORES,
    SCRIPTS,
    TRL,
    Client,
)

ROOT = Path(__file__).parents[2]
RECORDINGS = ROOT / "tests" / "api" / "recorded_clients"
ALL = (*CLIENTS, CODEX, CLAUDE_CODE, AIDER, TRL)
ROWS = [line.split(" | ") for line in (ROOT / "docs" / "clients.md").read_text().splitlines() if line.startswith("| ")]


def test_the_page_has_a_row_for_each_client_with_its_version() -> None:
    listed = {row[0].removeprefix("| "): row[1].split(" ")[0] for row in ROWS[1:]}
    assert listed == {client.name: client.version for client in ALL}


def test_the_readme_has_the_number_of_clients() -> None:
    assert f"[{len(ALL)} clients](docs/clients.md)" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("client", ALL, ids=lambda client: client.key)
def test_each_client_has_a_recording_of_its_version(client: Client) -> None:
    recording = json.loads((RECORDINGS / f"{client.key}.json").read_text())
    assert (recording["client"], recording["version"]) == (client.name, client.version)


def test_each_script_is_run() -> None:
    used = {client.script for client in CLIENTS} | {
        "scene.py",
        "litellm_thoughts.py",
        INSPECT_PROVIDER,
        LM_EVAL_SCORES,
        TRL.script,
    }
    assert {path.name for path in SCRIPTS.iterdir() if path.is_file()} == used


def test_no_recording_names_this_machine() -> None:
    text = "".join(path.read_text() for path in RECORDINGS.iterdir())
    assert "/tmp/" not in text and "/root/" not in text
