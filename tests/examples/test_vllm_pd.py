"""The example with vLLM: its programs are replaced by scripts that report how they were started, and its request is
sent to a server."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from motet.cli.main import COMMANDS, load
from motet.settings.server_config import environment
from tests.examples.test_examples import EXAMPLES, numbered, run
from tests.fake_server import FakeServer
from tests.tiny_tokenizer import save_tiny_tokenizer

EXAMPLE = EXAMPLES / "vllm_pd"
VLLM = """\
#!/usr/bin/env bash
printf '%s\\n' "$@" > {folder}/vllm.$VLLM_NIXL_SIDE_CHANNEL_PORT.part
mv {folder}/vllm.$VLLM_NIXL_SIDE_CHANNEL_PORT.part {folder}/vllm.$VLLM_NIXL_SIDE_CHANNEL_PORT
exec sleep 60
"""
MOTET = """\
#!/usr/bin/env bash
printf '%s\\n' "$@" > {folder}/motet
until [ -e {folder}/vllm.5601 ] && [ -e {folder}/vllm.5602 ]; do sleep 0.05; done
"""


def fake_program(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(script.format(folder=folder))
    program.chmod(0o755)
    return program


def value_of(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_two_servers_and_their_gateway_are_started_and_ended(tmp_path: Path) -> None:
    """Without `motet` on the PATH, the script starts the one in the repository's environment."""
    example = Path(shutil.copytree(EXAMPLE, tmp_path / "examples" / "vllm_pd"))
    vllm = fake_program(tmp_path, "play_vllm", VLLM)
    program = fake_program(tmp_path, "play_motet", MOTET)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    program.rename(tmp_path / ".venv" / "bin" / "motet")
    environ = {**environment(), "PATH": "/usr/bin:/bin"}
    subprocess.run([str(example / "servers.sh"), "the-model", str(vllm)], env=environ, check=True, timeout=60)

    prefill, decode, gateway = (
        (tmp_path / name).read_text().splitlines() for name in ("vllm.5601", "vllm.5602", "motet")
    )
    workers = [gateway[at + 1] for at, part in enumerate(gateway) if part == "--worker"]
    ports = [value_of(prefill, "--port"), value_of(decode, "--port")]
    assert workers == [f"http://127.0.0.1:{ports[0]},prefill", f"http://127.0.0.1:{ports[1]},decode"]
    for server in (prefill, decode):
        assert server[:2] == ["serve", "the-model"]
        assert json.loads(value_of(server, "--kv-transfer-config"))["kv_connector"] == "NixlConnector"
    assert value_of(gateway, "--tokenizer") == "the-model"
    assert {part for part in gateway if part.startswith("--")} <= flags_of("gateway")


def flags_of(command: str) -> set[str]:
    return {flag for parameter in load(command, COMMANDS[command]).params for flag in parameter.opts}


@pytest.mark.curl
def test_its_request_has_eight_choices(tmp_path: Path) -> None:
    with FakeServer(save_tiny_tokenizer(tmp_path), numbered) as server:
        completion, status = map(json.loads, run(str(EXAMPLE / "ask.sh"), server.url).splitlines())
    assert [choice["index"] for choice in completion["choices"]] == list(range(8))
    assert "workers" in status
