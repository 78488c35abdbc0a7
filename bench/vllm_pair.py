"""Two vLLM servers, one that prefills and one that decodes, as its own proxies drive them: something to compare with.

vLLM is no dependency of ours: `folder` is a virtual environment that has it. Each server gets one core to itself.
"""

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.load import TIMEOUT_S
from motet.config import environment
from motet.deploy.listen import listen, port_of

START_S = 300.0
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True)
class VLLMCounters:
    """Of the decode server."""

    transfers: int
    num_bytes: int

    def __sub__(self, earlier: "VLLMCounters") -> "VLLMCounters":
        return VLLMCounters(self.transfers - earlier.transfers, self.num_bytes - earlier.num_bytes)


@dataclass(frozen=True)
class VLLMPair:
    """Both running."""

    prefill: httpx.AsyncClient
    decode: httpx.AsyncClient

    async def prepare(self, body: dict[str, object]) -> dict[str, object]:
        """Prefills as vLLM's proxies do, n to both sides; the body for the decode server."""
        first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": ASK}
        del first["stream_options"]
        response = await self.prefill.post("/v1/completions", json=first)
        response.raise_for_status()
        return {**body, "kv_transfer_params": response.json()["kv_transfer_params"]}

    async def counters(self) -> VLLMCounters:
        return counters_in((await self.decode.get("/metrics")).text)


@contextlib.contextmanager
def vllm_pair(folder: Path, model: Path) -> Iterator[VLLMPair]:
    """Started, and ended whatever happens."""
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(vllm_server(folder, model, core)) for core in (0, 1)]
        for url in urls:
            wait_until_ready(url)
        yield VLLMPair(*(httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) for url in urls))


@contextlib.contextmanager
def vllm_server(folder: Path, model: Path, core: int) -> Iterator[str]:
    port, side_port = free_port(), free_port()
    own = {
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
        "HF_HUB_OFFLINE": "1",
    }
    command = ["taskset", "-c", str(core), str(folder / "bin" / "vllm"), "serve", str(model), "--served-model-name"]
    command += ["vllm", "--port", str(port), "--max-model-len", "4096", "--dtype", "bfloat16", "--enforce-eager"]
    command += ["--kv-transfer-config", json.dumps(CONNECTOR)]
    with tempfile.TemporaryFile() as log, started(command, {**environment(), **own}, log.fileno()):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def started(command: list[str], environ: Mapping[str, str], log: int) -> Iterator[None]:
    process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            if httpx.get(f"{url}/health").status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            if time.monotonic() > deadline:
                raise
        time.sleep(1)


def free_port() -> int:
    with listen("127.0.0.1", 0) as listener:
        return port_of(listener)


def counters_in(exposition: str) -> VLLMCounters:
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return VLLMCounters(
        int(values.get("vllm:nixl_xfer_time_seconds_count", 0)), int(values.get("vllm:nixl_bytes_transferred_sum", 0))
    )
