"""The benchmarks of separate prefill and decode report unexpected counters, and read vLLM's figures."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from bench.client.load import Timing
from bench.pd import PrefillDecodeRow
from bench.servers.vllm_pair import VLLMCounters, VLLMPair, counters_in
from bench.transfer import main
from motet.deploy.child import CounterSnapshot
from tests.tiny_models import save_tiny_model

TIMING = Timing(1.0, 1.0, 2.0, 64)
EXPECTED = {"prefills": 1, "kv_transfers": 1, "kv_transfer_bytes": 640, "recomputed_tokens": 1}


def row(**spent: int) -> PrefillDecodeRow:
    figures = CounterSnapshot(**{**dict.fromkeys(CounterSnapshot.__dataclass_fields__, 0), **EXPECTED, **spent})
    return PrefillDecodeRow(8, TIMING, figures, 640, TIMING, None, None)


def test_a_row_names_the_unexpected_counters() -> None:
    assert row().wrong == []
    assert row(kv_transfers=8, kv_transfer_bytes=5120).wrong == ["n=8: transfers 8, not 1", "n=8: bytes 5120, not 640"]
    assert row(prefills=2, recomputed_tokens=300).wrong == [
        "n=8: prefills 2, not 1",
        "n=8: recomputed tokens 300, not 1",
    ]


def test_transfers_of_vllm_are_read_from_its_metrics() -> None:
    exposition = """\
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="+Inf"} 8.0
vllm:nixl_xfer_time_seconds_count{engine="0"} 8.0
vllm:nixl_xfer_time_seconds_sum{engine="0"} 0.5
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf"} 8.0
vllm:nixl_bytes_transferred_count{engine="0"} 8.0
vllm:nixl_bytes_transferred_sum{engine="0"} 2.36e+08
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 336.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 8064.0
"""
    assert counters_in(exposition) == VLLMCounters(8, 236_000_000, 336)
    assert counters_in(exposition) - counters_in("") == VLLMCounters(8, 236_000_000, 336)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("prepare", "n"), [(VLLMPair.prepare, 8), (VLLMPair.prepare_once, 1)], ids=["as it is", "clamped"]
)
async def test_prefill_generates_one_token_and_decode_gets_the_ticket(
    prepare: Callable[[VLLMPair, dict[str, object]], Awaitable[dict[str, object]]], n: int
) -> None:
    sent: list[dict[str, object]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return httpx.Response(200, json={"kv_transfer_params": {"remote_port": 1}})

    async with httpx.AsyncClient(base_url="http://vllm", transport=httpx.MockTransport(answer)) as client:
        pair = VLLMPair(client, client)
        body = await prepare(pair, {"prompt": [1], "n": 8, "max_tokens": 64, "stream": True, "stream_options": {}})
    (first,) = sent
    assert (first["max_tokens"], first["stream"], first["n"]) == (1, False, n)
    assert "stream_options" not in first
    assert (body["max_tokens"], body["stream"], body["n"]) == (64, True, 8)
    assert body["kv_transfer_params"] == {"remote_port": 1}


@pytest.mark.long
@pytest.mark.usefixtures("all_forked")
def test_pulls_are_measured_over_each_transport(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny_model("llama", tmp_path)
    small = ["--ns", "1,3", "--repeats", "1", "--prompt-tokens", "50", "--settle", "0", "--idle", "0.1"]
    small += ["--kv-cache-gb", "0.05"]
    assert main(["--model", str(folder), *small]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [way["name"] for way in report["ways"]] == ["shared memory", "NIXL", "NIXL over TCP"]
    for way in report["ways"]:
        assert [(pull["n"], pull["transfers"], pull["recomputed_tokens"]) for pull in way["pulls"]] == [
            (1, 1, 1),
            (3, 1, 1),
        ]
        assert all(pull["num_bytes"] == pull["trunk_bytes"] > 0 for pull in way["pulls"])
        assert way["idle_percent"].keys() == {"prefill", "decode"}
