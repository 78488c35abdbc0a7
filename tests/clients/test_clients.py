"""Every client works as it is: its own package, in an environment of its own, against a real server.

`make clients` runs this before a release. With `--record-clients FOLDER` it also writes what each client sent, which
`tests/api/test_recorded_clients.py` sends again.
"""

import datetime
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from motet.testing.engine import Script
from motet.text.formats import ParserNames
from tests.clients.installed import CLIENTS, CODEX, LITELLM, SCRIPTS, Client
from tests.clients.recorder import Recorder
from tests.fake_server import FakeServer
from tests.tiny_tokenizer import fake_answer, save_tiny_tokenizer

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]

SCRIPT_TIMEOUT_S = 240
CODEX_CONFIG = """\
model = "tiny"
model_provider = "motet"
[model_providers.motet]
name = "Motet"
base_url = "{url}/v1"
wire_api = "responses"
"""
THOUGHT = '<think>Hm.</think><tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ECHO = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "echo ahoy"}}\n</tool_call>'


def saying(*texts: str) -> Script:
    """Makes each request the next text, in every choice, and requests that come later the last text."""
    given: dict[str, str] = {}
    return lambda request, start: fake_answer(
        given.setdefault(request.request_id, texts[min(len(given), len(texts) - 1)])
    )


def save(recorder: Recorder, folder: Path | None, client: Client, home: Path) -> None:
    if folder is not None:
        source = {"client": client.name, "version": client.version, "recorded": str(datetime.date.today())}
        recorder.save(folder / f"{client.key}.json", source, hidden=str(home))


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.key)
def test_a_client_works(
    client: Client, recorded: Recorder, clean: dict[str, str], tmp_path: Path, recordings: Path | None
) -> None:
    command = [*client.command(), recorded.url]
    done = subprocess.run(
        command, env=clean, cwd=tmp_path, capture_output=True, text=True, timeout=SCRIPT_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert recorded.exchanges and recorded.refused() == []
    save(recorded, recordings, client, tmp_path)


def test_litellm_sends_back_what_a_model_thought(
    clean: dict[str, str], tmp_path: Path, recordings: Path | None
) -> None:
    python = str(LITELLM.installed() / "bin" / "python")
    parsers = ParserNames(reasoning="think")
    with (
        FakeServer(save_tiny_tokenizer(tmp_path / "model"), saying(THOUGHT), parsers=parsers) as server,
        Recorder(server.url) as recorder,
    ):
        command = [python, str(SCRIPTS / "litellm_thoughts.py"), recorder.url, "tiny"]
        done = subprocess.run(
            command, env=clean, cwd=tmp_path, capture_output=True, text=True, timeout=SCRIPT_TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stderr
        assert recorder.refused() == []
        (*_, second) = recorder.exchanges
        assert "provider_specific_fields" in second["body"]["messages"][1]
        save(recorder, recordings, replace(LITELLM, script="litellm_thoughts.py"), tmp_path)


def test_codex_runs_a_command_that_the_model_calls_and_ends_with_its_answer(
    clean: dict[str, str], tmp_path: Path, recordings: Path | None
) -> None:
    codex = CODEX.installed() / "node_modules" / ".bin" / "codex"
    folder = save_tiny_tokenizer(tmp_path / "model")
    with FakeServer(folder, saying(ECHO, "Done."), max_model_len=200_000) as server, Recorder(server.url) as recorder:
        home = tmp_path / ".codex"
        home.mkdir()
        (home / "config.toml").write_text(CODEX_CONFIG.format(url=recorder.url))
        command = [str(codex), "exec", "--json", "--skip-git-repo-check", "-s", "read-only", "Say ahoy."]
        done = subprocess.run(
            command, env=clean, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=SCRIPT_TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        items = [json.loads(line).get("item", {}) for line in done.stdout.splitlines()]
        ran = [item["aggregated_output"] for item in items if item.get("status") == "completed"]
        assert len(ran) == 1 and "ahoy\n" in ran[0]
        assert [item["text"] for item in items if item.get("type") == "agent_message"] == ["Done."]
        assert len(recorder.exchanges) == 2 and recorder.refused() == []
        save(recorder, recordings, CODEX, tmp_path)
