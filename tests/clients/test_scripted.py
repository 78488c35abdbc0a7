"""Clients that need more than a small model: one that reasons, calls the right tool, or takes a long prompt.

The server is complete; only the output of its model is scripted.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from motet.text.formats import ParserNames
from tests.clients.installed import AIDER, CLAUDE_CODE, CODEX, LITELLM, SCRIPTS
from tests.clients.recorder import Recorder
from tests.clients.running import run, save_requests, script_of
from tests.fake_server import FakeServer
from tests.tiny_tokenizer import save_tiny_tokenizer

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]

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
BASH = '<think>Hm.</think><tool_call>\n{"name": "Bash", "arguments": {"command": "echo ahoy"}}\n</tool_call>'
CLAUDE_CODE_SETTINGS = {
    "ANTHROPIC_API_KEY": "none",
    "ANTHROPIC_MODEL": "tiny",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "ENABLE_TOOL_SEARCH": "false",
}
FILE = "boat.py\n```\nprint('ahoy')\n```\n"


@contextmanager
def scripted(folder: Path, *texts: str) -> Iterator[Recorder]:
    """Serves a model whose answers are these texts, one for each request. They can have reasoning."""
    model = save_tiny_tokenizer(folder / "model")
    with (
        FakeServer(model, script_of(*texts), max_model_len=200_000, parsers=ParserNames(reasoning="think")) as server,
        Recorder(server.url) as recorder,
    ):
        yield recorder


def test_litellm_sends_back_the_reasoning_of_a_model(
    clean: dict[str, str], tmp_path: Path, recordings: Path | None
) -> None:
    python = str(LITELLM.installed() / "bin" / "python")
    with scripted(tmp_path, THOUGHT) as recorder:
        run([python, str(SCRIPTS / "litellm_thoughts.py"), recorder.url, "tiny"], clean, tmp_path)
        assert "provider_specific_fields" in recorder.exchanges[-1]["body"]["messages"][1]
        save_requests(recorder, replace(LITELLM, script="litellm_thoughts.py"), home=tmp_path, recordings=recordings)


def test_codex_runs_a_command_that_the_model_calls_and_ends_with_its_answer(
    clean: dict[str, str], tmp_path: Path, recordings: Path | None
) -> None:
    codex = str(CODEX.installed() / "node_modules" / ".bin" / "codex")
    with scripted(tmp_path, ECHO, "Done.") as recorder:
        config = tmp_path / ".codex" / "config.toml"
        config.parent.mkdir()
        config.write_text(CODEX_CONFIG.format(url=recorder.url))
        output = run(
            [codex, "exec", "--json", "--skip-git-repo-check", "-s", "read-only", "Say ahoy."], clean, tmp_path
        )
        items = [json.loads(line).get("item", {}) for line in output.splitlines()]
        ran = [item["aggregated_output"] for item in items if item.get("status") == "completed"]
        assert len(ran) == 1 and "ahoy\n" in ran[0]
        assert [item["text"] for item in items if item.get("type") == "agent_message"] == ["Done."]
        assert len(recorder.exchanges) == 2
        save_requests(recorder, CODEX, home=tmp_path, recordings=recordings)


def test_claude_code_runs_a_command_that_the_model_calls_and_ends_with_its_answer(
    clean: dict[str, str], tmp_path: Path, recordings: Path | None
) -> None:
    claude = str(CLAUDE_CODE.installed() / "node_modules" / ".bin" / "claude")
    with scripted(tmp_path, BASH, "Done.") as recorder:
        environ = {**clean, **CLAUDE_CODE_SETTINGS, "ANTHROPIC_BASE_URL": recorder.url}
        flags = ["--output-format", "stream-json", "--verbose", "--allowedTools", "Bash(echo:*)"]
        output = run([claude, "-p", "Say ahoy.", *flags], environ, tmp_path)
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        assert [line["tool_use_result"]["stdout"] for line in lines if line["type"] == "user"] == ["ahoy"]
        assert [line["result"] for line in lines if line["type"] == "result"] == ["Done."]
        _, turn, _ = (turn for turn in recorder.exchanges[-1]["body"]["messages"] if turn["role"] != "system")
        assert [block["type"] for block in turn["content"]] == ["thinking", "tool_use"]
        save_requests(recorder, CLAUDE_CODE, home=tmp_path, recordings=recordings)


def test_aider_changes_a_file_to_the_text_of_the_model(
    clean: dict[str, str], tmp_path: Path, recordings: Path | None
) -> None:
    aider = str(AIDER.installed() / "bin" / "aider")
    boat = tmp_path / "boat.py"
    boat.write_text("print('hi')\n")
    flags = "--no-git --yes-always --no-check-update --analytics-disable --no-show-model-warnings --edit-format whole"
    with scripted(tmp_path, FILE) as recorder:
        environ = {**clean, "OPENAI_API_BASE": f"{recorder.url}/v1", "OPENAI_API_KEY": "none"}
        run([aider, "--model", "openai/tiny", *flags.split(), "--message", "Say ahoy.", boat.name], environ, tmp_path)
        assert boat.read_text() == "print('ahoy')\n"
        save_requests(recorder, AIDER, home=tmp_path, recordings=recordings)
