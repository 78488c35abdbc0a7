"""A cell on a system that lacks what only Linux has: it serves, gets new weights and ends as on Linux."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from safetensors.torch import load_file

from motet import weights
from motet.deploy.child import ChildServer
from motet.settings.server_config import environment
from tests.patience import PATIENCE_S
from tests.tiny_models import save_tiny_model

SITE = Path(__file__).parents[1] / "without_linux"
"""Folder of the `sitecustomize.py` that hides what only Linux has."""
BODY = {"model": "tiny", "prompt": "Once upon a time there was", "n": 4, "seed": 7, "max_tokens": 24}
PUSH = """
import sys
from safetensors.torch import load_file
from motet import weights
print(weights.push(sys.argv[1], load_file(sys.argv[2]), version="2", way=weights.Delivery.MEMORY))
"""
USED = {
    "fcntl motet.models.memory_file",
    "nixl motet.transfer.backends.nixl",
    "nixl_cu13 motet.transfer.backends.nixl",
    "resource motet.deploy.connection",
    "signal handlers of the event loop motet.deploy.shutdown",
    "the library of the process motet.deploy.server",
    "uvloop motet.cli.servers",
}
"""Lines that the log must have. They prove that something was hidden."""


def texts(url: str) -> list[str]:
    answer = httpx.post(f"{url}/v1/completions", json=BODY, timeout=PATIENCE_S).json()
    return [choice["text"] for choice in answer["choices"]]


@pytest.mark.long
@pytest.mark.slow
def test_a_cell_serves_gets_weights_and_ends_without_what_only_linux_has(
    folder: Path, tmp_path: Path, one_engine: Callable[[str], ChildServer]
) -> None:
    temporary, log = tmp_path / "temporary", tmp_path / "log"
    temporary.mkdir()
    path = os.pathsep.join([str(SITE), *filter(None, sys.path)])
    environ = {**environment(), "PYTHONPATH": path, "TMPDIR": str(temporary), "HIDDEN_LOG": str(log)}
    arguments = [
        str(folder), "--served-model-name", "tiny", "--kv-cache-gb", "0.05", "--threads", "1", "--dtype", "float32",
        "--prefill", "1", "--decode", "1", "--rl",
    ]  # fmt: skip
    new = save_tiny_model("llama", tmp_path / "new", seed=4) / "model.safetensors"
    old = folder / "model.safetensors"
    expected = texts(one_engine("float32").url)
    with ChildServer(arguments, environ=environ) as server:
        engines = psutil.Process(server.pid).children()
        assert texts(server.url) == expected
        assert weights.push(server.url, load_file(new), version="1") == "1"
        assert texts(server.url) != expected
        pushed = [sys.executable, "-c", PUSH, server.url, str(old)]
        assert subprocess.run(pushed, env=environ, capture_output=True, check=True, timeout=PATIENCE_S).stdout == b"2\n"
        assert texts(server.url) == expected
        os.kill(server.pid, signal.SIGINT)
        assert server.wait() == 0
        assert len(engines) == 2 and not psutil.wait_procs(engines, PATIENCE_S)[1]
    assert [*temporary.iterdir()] == []
    assert {*log.read_text().splitlines()} >= USED
