"""A real Prometheus scrapes a real cell in which an engine is killed, and answers every query of the dashboard and the
alerts."""

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from bench.servers.ports import free_port
from motet.deploy.child import ChildServer
from tests.boards.reading import DEPLOY, Prometheus, grafana_query, program, promtool, reading
from tests.boards.test_boards import ALERT, RULES, metrics_in
from tests.forked import ForkingProcess
from tests.hosts.servers import eventually
from tests.patience import PATIENCE_S
from tests.tiny_engine import TINY
from tools import dashboard

pytestmark = [pytest.mark.slow, pytest.mark.prometheus]

CELL = ("--prefill", "1", "--decode", "2", "--bypass-tokens", "0", "--metric-prefix", "vllm")
BODY = {"prompt": "the hand in the sand and then the other hand", "n": 8, "seed": 1, "ignore_eos": True}
FAILURES_PANEL, FAILURES = "Failed transfers", "motet:kv_transfer_failures_total"
"""The only panel and metric that can have no series, since no transfer has to fail here."""


def complete(server: ChildServer, **changes: object) -> list[str]:
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY | {"max_tokens": 24} | changes, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def kill_the_generating_engine(server: ChildServer) -> None:
    """Requests a long answer, kills the engine that generates it, and reads the answer to its end."""
    workers = httpx.get(f"{server.url}/status", timeout=PATIENCE_S).json()["workers"]
    pids = {one["id"]: one["pid"] for one in workers}  # read first, to kill the engine early in the answer
    body = BODY | {"max_tokens": 2000, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(pids[response.headers["x-motet-worker"]], signal.SIGKILL)
        assert list(lines)[-2:] == ["data: [DONE]", ""]


@pytest.fixture(scope="module")
def watched(
    long_folder: Path, forking: ForkingProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """A Prometheus that has scraped all metrics of a cell, before and after an engine was killed."""
    program("prometheus")
    port = free_port()
    with (
        reading(f"127.0.0.1:{port}", tmp_path_factory.mktemp("prometheus")) as prometheus,
        forking.server([str(long_folder), *TINY, *CELL], port=port) as server,
    ):
        prometheus.until("motet:worker_state")  # scrape the counters before they grow
        with ThreadPoolExecutor(2) as clients:
            list(clients.map(lambda seed: complete(server, seed=seed), range(4)))
        kill_the_generating_engine(server)
        complete(server)
        prometheus.until('motet:migrations_total{cause="died"}')
        prometheus.until("sum(motet:engine_restarts_total) >= 1 and count(motet:num_groups_running) == 3")
        for name in ("http_requests", "routing_decisions"):  # series that start with their first event
            prometheus.until(f"rate(motet:{name}_total[1m])")
        yield prometheus


def test_every_query_of_the_dashboard_finds_its_series(watched: Prometheus) -> None:
    empty = {
        title for title, expression in dashboard.queries() if not watched.query(grafana_query(expression, rate_s=60))
    }
    assert empty <= {FAILURES_PANEL}


def test_every_alert_is_evaluated_and_its_metrics_exist(watched: Prometheus) -> None:
    alerts = ALERT.findall(RULES)
    assert eventually(watched.errors_of_rules, lambda errors: len(errors) == len(alerts)) == dict.fromkeys(alerts, "")
    assert metrics_in(RULES) - watched.names() <= {FAILURES}


def test_the_loss_is_counted_by_its_cause_and_the_states_add_up(watched: Prometheus) -> None:
    (moved,) = watched.query("motet:migrations_total")
    assert (moved["cause"], moved["outcome"]) == ("died", "resumed")
    states = watched.query("sum by (worker) (motet:worker_state) == 1")
    assert [one["worker"] for one in states] == ["decode-0", "decode-1", "prefill-0"]


def test_no_counter_decreases_when_an_engine_dies_and_is_replaced(watched: Prometheus) -> None:
    counters = [name for name in watched.names() if re.search("_(total|bucket|count|sum)$", name)]
    assert len(counters) > 80
    assert not [name for name in counters if watched.query(f"resets({name}[1h]) > 0")]


def test_variables_of_the_dashboard_have_values(watched: Prometheus) -> None:
    _, *variables = dashboard.variables()
    for variable in variables:
        found = re.fullmatch(r"label_values\((\S+), (\w+)\)", str(variable["definition"]))
        assert found is not None
        series = watched.query(found[1])
        assert series and all(one.get(found[2]) for one in series)


def test_metrics_of_vllm_have_one_series_per_server(watched: Prometheus) -> None:
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"):
        assert len(watched.query(f"vllm:{name}")) == 1


def test_the_alerts_fire_in_time_and_not_before() -> None:
    result = promtool("test", "rules", Path(__file__).with_name("rules_test.yml"))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("kind", "file"), [("rules", "rules.yml"), ("config", "prometheus.yml")])
def test_promtool_finds_no_error(kind: str, file: str) -> None:
    result = promtool("check", kind, DEPLOY / file)
    assert result.returncode == 0, result.stdout + result.stderr
