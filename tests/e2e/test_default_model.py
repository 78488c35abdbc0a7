"""Real processes serve the default model: its answers make sense, and `make demo` prints what it announces."""

import json
import subprocess
import sys
import tempfile
from typing import Any

import httpx
import pytest

from motet.deploy.child import ChildServer
from motet.settings.server_config import environment
from tests.forked import ForkingProcess
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.usefixtures("default_weights")]


def test_the_default_model_makes_sense(default_server: ChildServer) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 12,
        "n": 2,
    }
    answer = httpx.post(f"{default_server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert "Paris" in texts[0]
    assert texts[0] == texts[1]


def demo(forking: ForkingProcess, *arguments: str) -> tuple[dict[str, Any], str]:
    """Returns the figures, which are all of standard output, and the rest of the output."""
    command = [sys.executable, "-m", "motet", "demo", "--json", "--max-tokens", "24", *arguments]
    environ = {**environment(), "MOTET_KV_CACHE_GB": "0.25"}
    with tempfile.TemporaryFile("w+") as log:
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        with forking.popen(command, env=environ, text=True, **streams) as process:
            output, _ = process.communicate()
        log.seek(0)
        assert process.returncode == 0, log.read()
        log.seek(0)
        return json.loads(output), log.read()


def test_the_demo_prefills_once_transfers_the_prompt_s_kv_once_and_survives_a_kill(forking: ForkingProcess) -> None:
    receipt, output = demo(forking)
    assert receipt["n"] == 8
    assert (receipt["prefills"], receipt["transfers"], receipt["recomputed_tokens"]) == (1, 1, 1)
    assert receipt["transfer_bytes"] == receipt["trunk_bytes"] > 0
    assert receipt["prompt_tokens_prefilled"] == receipt["prompt_tokens"]
    assert all(f"--- choice {i} (" in output for i in range(8))
    assert receipt["kill"]["worker"] in ("decode-0", "decode-1")
    assert receipt["kill"]["identical"] == 8
    assert "8 of 8 answers are the same" in output


def test_the_demo_of_a_single_server_prefills_its_prompt_once_and_shares_it(forking: ForkingProcess) -> None:
    receipt, output = demo(forking, "--single")
    assert receipt["n"] == 4
    assert (receipt["prefills"], receipt["transfers"]) == (0, 0)
    assert receipt["prompt_tokens_prefilled"] == receipt["prompt_tokens"]
    trunk_blocks = -(-receipt["prompt_tokens"] // 16)
    assert receipt["blocks_shared"] == 3 * trunk_blocks
    assert all(f"--- choice {i} (" in output for i in range(4))
    assert receipt["kill"] is None
    assert "No engine is killed" in output
