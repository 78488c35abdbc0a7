"""Third-party servers, faked by a script, are started with their flags and ended with their children."""

import os
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from bench.servers.llama import LlamaSetup
from bench.servers.peer_server import peer_server
from bench.servers.vllm import VLLMSetup
from motet.errors import StartupError
from tests.e2e.processes import wait_until_gone
from tests.patience import PATIENCE_S

HEALTHY = """\
#!/usr/bin/env python3
import http.server, subprocess, sys

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass

subprocess.Popen(["sleep", "1000"])
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""
BROKEN = """\
#!/bin/sh
echo no model at "$2" >&2
exit 3
"""


def setup_of(tmp_path: Path, script: str) -> VLLMSetup:
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(script)
    program.chmod(0o755)
    return VLLMSetup(tmp_path, Path("/models/small"), cores=(0,))


def test_threads_and_processes_of_vllm_get_the_same_cores() -> None:
    setup = VLLMSetup(Path("/venv"), Path("/models/small"), cores=(0, 1), arguments=("--seed", "1"), environ={"A": "b"})
    command = setup.command(8001)
    assert command[:6] == ["taskset", "-c", "0,1", "/venv/bin/vllm", "serve", "/models/small"]
    assert command[command.index("--port") + 1] == "8001"
    assert command[-2:] == ["--seed", "1"]
    assert {"VLLM_CPU_OMP_THREADS_BIND": "0,1", "A": "b"}.items() <= setup.environment().items()


def test_llama_server_has_a_slot_for_each_choice_and_finds_its_libraries() -> None:
    setup = LlamaSetup(
        Path("/llama/llama-server"), Path("/m.gguf"), slots=64, context=9000, threads=2, arguments=("-v",)
    )
    command = setup.command(8001)
    assert command[:3] == ["/llama/llama-server", "--model", "/m.gguf"]
    assert {"--parallel": "64", "--ctx-size": "9000", "--threads": "2", "--port": "8001"}.items() <= dict(
        pairwise(command)
    ).items()
    assert command[-1] == "-v"
    assert setup.environment()["LD_LIBRARY_PATH"].split(":")[0] == "/llama"


@pytest.mark.slow
def test_the_error_of_a_server_that_does_not_start_has_its_log(tmp_path: Path) -> None:
    with (
        peer_server(setup_of(tmp_path, BROKEN)) as server,
        pytest.raises(StartupError, match=r"exit code 3 .*\n.*no model at /models/small"),
    ):
        server.wait_until_ready()


@pytest.mark.slow
def test_a_server_and_its_children_are_pinned_to_cores_and_ended(tmp_path: Path) -> None:
    with peer_server(setup_of(tmp_path, HEALTHY)) as server:
        server.wait_until_ready()
        (child,) = psutil.Process(server.process.pid).children(recursive=True)
        core = min(os.sched_getaffinity(0))
        family = [server.process.pid, child.pid]
        for pid in family:
            os.sched_setaffinity(pid, os.sched_getaffinity(0))
        server.pin((core,))
        assert [os.sched_getaffinity(pid) for pid in family] == [{core}, {core}]
    assert server.process.returncode is not None
    wait_until_gone(child.pid, PATIENCE_S)
