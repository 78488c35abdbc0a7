"""Runs two vLLM servers, one for prefill and one for decode, and sends requests to them as vLLM's own proxies do.

Each server has one core.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.client.load import TIMEOUT_S
from bench.servers.peer_server import peer_server
from bench.servers.ports import free_port
from bench.servers.vllm import VLLMSetup

CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True)
class VLLMCounters:
    """Counters of the decode server."""

    transfers: int
    num_bytes: int
    computed_tokens: int = 0
    """Number of prompt tokens that were neither cached nor transferred."""

    def __sub__(self, earlier: "VLLMCounters") -> "VLLMCounters":
        return VLLMCounters(
            self.transfers - earlier.transfers,
            self.num_bytes - earlier.num_bytes,
            self.computed_tokens - earlier.computed_tokens,
        )


@dataclass(frozen=True)
class VLLMPair:
    """Clients of both servers, which are ready."""

    prefill: httpx.AsyncClient
    decode: httpx.AsyncClient

    async def prepare(self, body: dict[str, object]) -> dict[str, object]:
        """Prefills as vLLM's proxies do, with n at both servers, and returns the body for the decode server."""
        return await self._prepare(body, {})

    async def prepare_once(self, body: dict[str, object]) -> dict[str, object]:
        """Does the same, but requests only one choice from the prefill server."""
        return await self._prepare(body, {"n": 1})

    async def _prepare(self, body: dict[str, object], changed: dict[str, object]) -> dict[str, object]:
        first = {**body, **changed, "max_tokens": 1, "stream": False, "kv_transfer_params": PREFILL_PARAMS}
        del first["stream_options"]
        response = await self.prefill.post("/v1/completions", json=first)
        response.raise_for_status()
        return {**body, "kv_transfer_params": response.json()["kv_transfer_params"]}

    async def counters(self) -> VLLMCounters:
        return counters_in((await self.decode.get("/metrics")).text)


@contextlib.contextmanager
def vllm_pair(folder: Path, model: Path, arguments: Sequence[str] = ()) -> Iterator[VLLMPair]:
    """Starts both servers with `arguments`, and ends them at the end of the context, also after an error."""

    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(peer_server(setup_of(folder, model, core, arguments))) for core in (0, 1)]
        for core, server in enumerate(servers):
            server.wait_until_ready()
            server.pin((core,))
        yield VLLMPair(*(httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S) for server in servers))


def setup_of(folder: Path, model: Path, core: int, arguments: Sequence[str] = ()) -> VLLMSetup:
    own = ("--kv-transfer-config", json.dumps(CONNECTOR), *arguments)
    return VLLMSetup(folder, model, (core,), own, {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())})


def counters_in(exposition: str) -> VLLMCounters:
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            name = " ".join((sample.name, sample.labels.get("source", ""))).strip()
            values[name] = values.get(name, 0.0) + sample.value
    return VLLMCounters(
        int(values.get("vllm:nixl_xfer_time_seconds_count", 0)),
        int(values.get("vllm:nixl_bytes_transferred_sum", 0)),
        int(values.get("vllm:prompt_tokens_by_source_total local_compute", 0)),
    )
