"""Real vLLM servers with a core each, which can exchange KV, and gateways in front of them."""

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from bench.servers.peer_server import PeerServer, peer_server
from bench.servers.ports import free_port
from bench.servers.vllm import MODEL_NAME, VLLMSetup
from bench.servers.vllm_pair import CONNECTOR
from motet.deploy.child import ChildServer
from motet.settings.server_config import environment
from tests.status import metric_sum

PATIENCE_S = 60.0
SCALE_OUT = "--enable-scale-out"
SUSPECT = "Potentially invalid KV blocks"
TRANSFERS = "vllm:nixl_xfer_time_seconds_count"
BYTES = "vllm:nixl_bytes_transferred_sum"


@dataclass(frozen=True)
class RealVLLM:
    """One real vLLM server."""

    server: PeerServer

    @property
    def url(self) -> str:
        return self.server.url

    def metric(self, name: str, **labels: str) -> float:
        return metric_sum(httpx.get(f"{self.url}/metrics").text, name, **labels)

    def local(self, source: str) -> float:
        """Returns the number of prompt tokens from that source."""
        return self.metric("vllm:prompt_tokens_by_source_total", source=source)

    @property
    def holds_nothing(self) -> bool:
        return self.metric("vllm:kv_cache_usage_perc") == 0 == self.metric("vllm:num_requests_running")

    @property
    def log(self) -> str:
        self.server.log.seek(0)
        return self.server.log.read().decode(errors="replace")

    def answer(self, **body: object) -> dict[str, object]:
        """Sends a request to the server directly, and returns the answer."""
        response = httpx.post(f"{self.url}/v1/completions", json={"model": MODEL_NAME, **body}, timeout=PATIENCE_S)
        assert response.status_code == httpx.codes.OK, response.text
        answer: dict[str, object] = response.json()
        return answer

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops the server during the context: its process exists, but answers nothing."""
        self.server.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.server.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kills the server with its engine, which would run for some time after it."""
        server = psutil.Process(self.server.process.pid)
        for process in (*server.children(recursive=True), server):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.server.process.wait()


@contextlib.contextmanager
def real_vllm(folder: Path, model: Path, core: int, *arguments: str) -> Iterator[RealVLLM]:
    """Starts a server without waiting until it is ready."""
    connector = ("--kv-transfer-config", json.dumps(CONNECTOR))
    environ = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "VLLM_CPU_KVCACHE_SPACE": "1"}
    with peer_server(VLLMSetup(folder, model, (core,), (*connector, *arguments), environ)) as server:
        yield RealVLLM(server)


@contextlib.contextmanager
def gateway(model: Path, tmp: Path, *arguments: str) -> Iterator[ChildServer]:
    """Runs a gateway. `arguments` are its workers and other flags."""
    own = ("--tokenizer", str(model), "--bypass-tokens", "0", "--worker-timeout", "20", *arguments)
    environ = {**environment(), "TMPDIR": str(tmp)}
    with ChildServer(list(own), command="gateway", environ=environ) as server:
        yield server


def until(holds: Callable[[], bool], otherwise: str) -> None:
    """Polls a condition until it holds. vLLM updates its counters with a delay."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.1)
