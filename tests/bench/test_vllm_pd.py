"""The benchmark of vLLM servers behind a gateway: a prompt that is moved twice is seen, and figures are read."""

import json

import httpx
import pytest

from bench.load import Timing
from bench.vllm_pair import VLLMCounters, VLLMPair, counters_in
from bench.vllm_pd import GATEWAY, Cost, Row, parse, table_of


def row(transfers: int) -> Row:
    once = Cost(Timing(1.0, 1.5, 2.0, 64), VLLMCounters(transfers, 29_500_000, 48))
    naive = Cost(Timing(1.0, 2.0, 5.0, 64), VLLMCounters(8, 235_900_000, 0))
    return Row(8, {GATEWAY: once, "naive": naive})


def test_a_prompt_that_is_moved_twice_is_told() -> None:
    assert row(1).broken == []
    assert row(2).broken == ["n=8: 2 transfers, not 1"]


def test_totals_are_told_beside_that_of_the_gateway() -> None:
    assert row(1).ratio("naive") == 2.5
    assert table_of([row(1)]).row_count == 2


def test_tokens_that_decode_computes_are_read_from_its_metrics() -> None:
    exposition = """\
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 336.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 8064.0
"""
    assert counters_in(exposition) == VLLMCounters(0, 0, 336)


@pytest.mark.anyio
async def test_a_clamped_prefill_is_for_one_choice() -> None:
    sent: list[dict[str, object]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return httpx.Response(200, json={"kv_transfer_params": {"remote_port": 1}})

    async with httpx.AsyncClient(base_url="http://vllm", transport=httpx.MockTransport(answer)) as client:
        pair = VLLMPair(client, client)
        asked: dict[str, object] = {"prompt": [1], "n": 8, "max_tokens": 64, "stream": True, "stream_options": {}}
        body = await pair.prepare_once(asked)
    assert (sent[0]["n"], body["n"]) == (1, 8)


def test_it_wants_a_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([])
    assert "--vllm" in capsys.readouterr().err
