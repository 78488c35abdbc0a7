"""Blocks of commands and Python on the pages run as they are printed, against real servers.

The following is replaced in a block, and nothing else:

- `http://127.0.0.1:8000` becomes the URL of the running server, and each port that a block uses becomes a free one.
- In blocks that start servers, the model (`smollm2`, `MODEL`) becomes a tiny random model under the same name, with a
  small KV cache. Addresses of the machines 10.0.0.x become 127.0.0.1.
- `/checkpoints/step-1` becomes the folder of the tiny model.
- Lines with `pip install` are skipped, because the packages are installed.
"""

import json
import re
import select
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from transformers import AutoModelForCausalLM

from bench.servers.ports import free_port
from motet import weights
from motet.deploy.child import ChildServer
from motet.settings.server_config import environment
from tests.forked import ForkingProcess
from tests.patience import PATIENCE_S
from tests.status import metric_sum
from tools.blocks import ROOT, Block, Kind, all_blocks

pytestmark = pytest.mark.slow

RUN = [block for block in all_blocks() if block.kind is Kind.RUN]
SMALL = ("--kv-cache-gb", "0.05", "--threads", "1")
NAME = "smollm2"
MACHINE = r"(?:10\.0\.0\.\d+|127\.0\.0\.1)"
LONG_PROMPT = "the cat sat on the mat and " * 40


def blocks(world: str) -> pytest.MarkDecorator:
    """Parametrizes a test with the blocks of this world."""
    found = [pytest.param(block, id=block.place, marks=[*marks(block)]) for block in RUN if block.detail == world]
    return pytest.mark.parametrize("block", found)


def marks(block: Block) -> Iterator[pytest.MarkDecorator]:
    if "--otlp-endpoint" in block.text:  # without a collector, servers with traces take three seconds to stop
        yield pytest.mark.long
    if "curl " in block.text:
        yield pytest.mark.curl


def run_shell(command: str, *, cwd: Path = ROOT, environ: Mapping[str, str] | None = None) -> str:
    """Runs a command in bash, with `motet` and `python` of this environment, and returns its output."""
    path = f"{Path(sys.executable).parent}:{environment()['PATH']}"
    environ = {**environment(), "PATH": path, **(environ or {})}
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=250
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.real
@blocks("server")
def test_a_block_runs_against_the_default_model(
    block: Block, default_server: ChildServer, capsys: pytest.CaptureFixture[str]
) -> None:
    text = block.text.replace("http://127.0.0.1:8000", default_server.url)
    if block.language == "python":
        exec(
            compile(text, block.place, "exec"), {"client": OpenAI(base_url=f"{default_server.url}/v1", api_key="none")}
        )
        assert capsys.readouterr().out
    else:
        assert "choices" in json.loads(run_shell(text))


@pytest.mark.real
@pytest.mark.parametrize(
    "block", [block for block in RUN if block.detail.startswith("POST ")], ids=lambda block: block.place
)
def test_the_bodies_of_a_block_are_accepted(block: Block, default_server: ChildServer) -> None:
    route, rest = block.detail.removeprefix("POST "), block.text.strip()
    while rest:
        body, end = json.JSONDecoder().raw_decode(rest)
        response = httpx.post(f"{default_server.url}{route}", json=body, timeout=PATIENCE_S)
        assert response.status_code == httpx.codes.OK, response.text
        rest = rest[end:].strip()


@dataclass
class ServerBlock:
    """A block that starts servers. They run until `stack` ends."""

    block: Block
    folder: Path
    forking: ForkingProcess
    stack: ExitStack
    ports: defaultdict[str, str] = field(default_factory=lambda: defaultdict(lambda: str(free_port())))
    """The free port for each address of the block."""
    environ: dict[str, str] = field(default_factory=dict)
    servers: list[ChildServer] = field(default_factory=list)

    def run(self) -> None:
        for command in self.block.commands():
            words = shlex.split(command)
            if words[0] == "export":
                self.environ |= dict(word.split("=", 1) for word in words[1:])
            elif words[:2] in (["motet", "serve"], ["motet", "gateway"]):
                self.start(command)
            elif "pip" not in words:
                run_shell(self.rewritten(command), environ=self.environ)

    def rewritten(self, command: str) -> str:
        command = re.sub(rf"{MACHINE}:\d+", lambda found: f"127.0.0.1:{self.ports[found[0]]}", command)
        command = re.sub(r"(?<=-port )\d+", lambda found: self.ports[f"127.0.0.1:{found[0]}"], command)
        return re.sub(MACHINE, "127.0.0.1", command)

    def start(self, command: str) -> None:
        _, kind, *arguments = shlex.split(self.rewritten(command))
        machine = re.search(f"--side-channel-host ({MACHINE})", command)
        port = self.ports[f"{machine[1] if machine else '127.0.0.1'}:8000"]
        if "--port" in arguments:
            port = arguments[arguments.index("--port") + 1]
        if kind == "serve":
            own = [str(self.folder) if word in (NAME, "MODEL") else word for word in arguments]
            arguments = [*SMALL, "--served-model-name", NAME, *own]
        environ = {**environment(), **self.environ}
        server = self.forking.server(arguments, command=kind, port=int(port), environ=environ)
        self.servers.append(self.stack.enter_context(server))

    def chat(self, n: int) -> httpx.Response:
        """Sends a request to the server that was started last."""
        key = self.environ.get("MOTET_API_KEYS", "none")
        body = {"messages": [{"role": "user", "content": LONG_PROMPT}], "n": n, "max_tokens": 4}
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{self.servers[-1].url}/v1/chat/completions"
        return httpx.post(url, json=body, headers=headers, timeout=PATIENCE_S)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@blocks("servers")
def test_a_block_starts_servers_that_answer(
    block: Block, folder: Path, forking: ForkingProcess, stack: ExitStack
) -> None:
    running = ServerBlock(block, folder, forking, stack)
    running.run()
    response = running.chat(n=3)
    assert response.status_code == httpx.codes.OK, response.text
    assert len(response.json()["choices"]) == 3
    if "--role decode" in block.text:
        headers = {"Authorization": f"Bearer {running.environ['MOTET_API_KEYS']}"}
        metrics = httpx.get(f"{running.servers[-1].url}/metrics", headers=headers).text
        assert metric_sum(metrics, "motet:kv_transfers_total") == 1


@pytest.fixture(scope="module")
def trained_server(folder: Path, forking: ForkingProcess) -> Iterator[ChildServer]:
    with forking.server([str(folder), *SMALL, "--served-model-name", NAME, "--rl"]) as server:
        yield server


@blocks("trainer")
def test_a_block_of_a_trainer_updates_a_server(
    block: Block, folder: Path, trained_server: ChildServer, tmp_path: Path
) -> None:
    text = block.text.replace("http://127.0.0.1:8000", trained_server.url)
    if block.language == "sh":
        shutil.copy(folder / "model.safetensors", tmp_path)
        run_shell(text.replace("/checkpoints/step-1", str(folder)), cwd=tmp_path)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
        exec(compile(text, block.place, "exec"), names := {"model": model, "requests": httpx, "weights": weights})
        if "class MotetTransfer" in text:
            transfer = names["MotetTransfer"](trained_server.url)  # type: ignore[operator]
            transfer.pause()
            transfer.send_weights(model.named_parameters())
            transfer.resume()


@blocks("events")
def test_a_block_prints_events_of_a_server(block: Block, folder: Path, forking: ForkingProcess) -> None:
    port = str(free_port())
    with forking.server([str(folder), *SMALL, "--kv-events-port", port]) as server:
        program = [sys.executable, "-u", "-c", block.text.replace("5557", port)]
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for number in count():  # until the program has subscribed
                body = {"prompt": f"{number} {LONG_PROMPT}", "max_tokens": 1}
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S).raise_for_status()
                if select.select([process.stdout], [], [], 0.1)[0]:
                    break
            assert "BlockStored" in process.stdout.readline()
            process.kill()
