"""The benchmark of vLLM servers with a gateway finds a prompt that is transferred twice."""

import pytest

from bench.client.load import Timing
from bench.servers.vllm_pair import VLLMCounters
from bench.vllm_pd import GATEWAY, GatewayRow, WayCost, parse, table_of


def row(transfers: int) -> GatewayRow:
    once = WayCost(Timing(1.0, 1.5, 2.0, 64), VLLMCounters(transfers, 29_500_000, 48))
    naive = WayCost(Timing(1.0, 2.0, 5.0, 64), VLLMCounters(8, 235_900_000, 0))
    return GatewayRow(8, {GATEWAY: once, "naive": naive})


def test_a_prompt_that_is_transferred_twice_is_reported() -> None:
    assert row(1).broken == []
    assert row(2).broken == ["n=8: 2 transfers, not 1"]


def test_totals_are_compared_with_the_total_of_the_gateway() -> None:
    assert row(1).ratio("naive") == 2.5
    assert len(table_of([row(1)]).rows) == 2


def test_the_vllm_flag_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([])
    assert "--vllm" in capsys.readouterr().err
