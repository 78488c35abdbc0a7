"""The costs of a cell's size: the number of gateways, and tiny runs of the measurements."""

import dataclasses

import pytest

from bench.cell_size.__main__ import (
    QUICK,
    Effort,
    PlannedCell,
    SocketCosts,
    demands,
    prices,
    record,
    socket_costs,
    table_of,
)
from bench.cell_size.directory_cost import directory_cost
from bench.cell_size.fleet_cost import fleet_cost
from bench.cell_size.gateway_count import DECISIONS, USED, Demand, Prices, gateway_needs
from bench.cell_size.index_memory import IndexSize, index_size
from bench.cell_size.socket_costs import EventCost, FollowedCost, StatusCost, TokenCost, event_cost, followed_cost

PRICES = Prices(
    token_us=10, status_request_us=100, status_answer_us=200, message_us=200, decision_us=1000, block_bytes=100
)  # fmt: skip


def test_a_single_worker_needs_one_gateway_that_decides_once_a_group() -> None:
    one = Demand(1, 0, 2048.0)  # a group of 8 choices of 256 tokens a second
    found = gateway_needs(one, PRICES)
    assert (one.groups_per_s, one.messages_per_s) == (1.0, 1.0)
    assert found.standing == pytest.approx(100e-6 + 200e-6)
    assert found.busy == pytest.approx(2048 * 10e-6 + 1000e-6)
    assert (found.gateways, found.pairs, found.connections) == (1, 0, 2)
    assert found.answering == pytest.approx(200e-6)
    assert found.index_gb == pytest.approx(1000 * 100 / 1e9)


def test_with_separate_prefill_a_group_needs_more_decisions_and_two_messages() -> None:
    joint, separate = Demand(100, 0, 2048.0), Demand(100, 25, 2048.0)
    assert separate.messages_per_s == 2 * joint.messages_per_s == 200.0
    more = gateway_needs(separate, PRICES).busy - gateway_needs(joint, PRICES).busy
    assert more == pytest.approx(100 * (DECISIONS - 1) * 1000e-6)
    assert gateway_needs(separate, PRICES).pairs == 2500


def test_there_are_just_enough_gateways_to_carry_the_load() -> None:
    found = gateway_needs(Demand(1000, 250, 2048.0), PRICES)
    assert found.gateways is not None
    left = USED - found.standing
    assert found.gateways * left >= found.busy > (found.gateways - 1) * left
    assert found.answering == pytest.approx(found.gateways * 200e-6)


def test_no_number_of_gateways_is_enough_if_following_the_workers_fills_a_core() -> None:
    found = gateway_needs(Demand(10_000, 2500, 2048.0), PRICES)
    assert found.standing > USED
    assert (found.gateways, found.answering) == (None, 0.0)


def test_a_single_worker_does_everything_and_ten_have_prefill_workers_too() -> None:
    assert {demand.prefill for demand in demands(1, 10)} == {0}
    assert {(demand.decode, demand.prefill) for demand in demands(10, 10)} == {(10, 3)}


def test_a_fleet_of_any_size_is_measured() -> None:
    for workers in (1, 3):
        cost = fleet_cost(workers, turns=2)
        assert cost.workers == workers
        assert all(value > 0 for value in dataclasses.astuple(cost))


def test_messages_of_block_events_cost_time_and_more_blocks_are_more_bytes() -> None:
    few, many = event_cost(5, 1), event_cost(5, 40)
    assert few.message_us > 0 and many.message_us > 0
    assert many.bytes > few.bytes + 39 * 2 * 16, "a stored and a removed name of each block"


def test_directory_traffic_grows_with_workers_and_at_the_start_with_their_pairs() -> None:
    small, large = directory_cost(40, 10), directory_cost(400, 100)
    assert 9 < large.listing_bytes / small.listing_bytes < 11
    assert 9 < large.bytes_per_s / small.bytes_per_s < 11
    assert large.starting_bytes > 50 * small.starting_bytes


def test_following_workers_takes_descriptors() -> None:
    assert followed_cost(3).descriptors >= 2, "a subscription and its connection"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("all_forked")
def test_a_tiny_run_fills_every_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.cell_size.socket_costs.CLIENTS", 4)
    monkeypatch.setattr("bench.cell_size.socket_costs.MAX_TOKENS", 16)
    fleets, indexes = [fleet_cost(2, turns=2)], [index_size(2, 10)]
    sockets = socket_costs((8,), Effort(status_requests=5, messages=5, loads=1, turns=2))
    planned = [
        PlannedCell(demand, gateway_needs(demand, prices(fleets[0], indexes[0], sockets))) for demand in demands(2, 10)
    ]
    for rows in (fleets, indexes, sockets.events, sockets.tokens, planned):
        assert len(table_of("", list(rows)).rows) == len(rows)
    assert planned[0].need.gateways == 1
    assert set(record(sockets, fleet=fleets, gateways=planned)) == {"wire", "tables"}


def test_prices_are_taken_from_the_rows_that_gateways_are_computed_for() -> None:
    sockets = SocketCosts(
        status=StatusCost(1, 2),
        events=[EventCost(1, 1, 30), EventCost(84, 1, 40)],
        followed=FollowedCost(1, 0),
        tokens=[TokenCost(1, 0, 50), TokenCost(8, 0, 60)],
    )
    found = prices(fleet_cost(1, turns=QUICK.turns), _index(), sockets)
    assert (found.token_us, found.message_us, found.status_request_us, found.block_bytes) == (60, 40, 1, 900.0)


def _index() -> IndexSize:
    return IndexSize(1, 1, 100.0, 900.0, 80.0, 1, 1, 1)
