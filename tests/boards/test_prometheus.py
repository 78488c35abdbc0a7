"""A real Prometheus reads a real cell, one of whose engines is killed, and answers every query of the dashboard and of
the alerts."""

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
from tests.boards.reading import DEPLOY, Prometheus, asked_by_grafana, program, promtool, reading
from tests.boards.test_boards import ALERT, RULES, asked_in
from tests.forked import ForkingProcess
from tests.hosts.servers import eventually
from tests.patience import PATIENCE_S
from tests.tiny_engine import TINY
from tools import dashboard

pytestmark = [pytest.mark.slow, pytest.mark.prometheus]

CELL = ("--prefill", "1", "--decode", "2", "--bypass-tokens", "0", "--metric-prefix", "vllm")
BODY = {"prompt": "the hand in the sand and then the other hand", "n": 8, "seed": 1, "ignore_eos": True}
FAILURES_PANEL, FAILURES = "Transfers that failed", "motet:kv_transfer_failures_total"
"""The only panel and metric that may have no series: no transfer need fail here."""


def complete(server: ChildServer, **changes: object) -> list[str]:
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY | {"max_tokens": 24} | changes, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def kill_the_writer(server: ChildServer) -> None:
    """Begins a long answer, kills the engine that writes it, and reads the answer to its end."""
    workers = httpx.get(f"{server.url}/status", timeout=PATIENCE_S).json()["workers"]
    pids = {one["id"]: one["pid"] for one in workers}  # known before: the engine writes on meanwhile
    body = BODY | {"max_tokens": 300, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(pids[response.headers["x-motet-worker"]], signal.SIGKILL)
        assert list(lines)[-2:] == ["data: [DONE]", ""]


@pytest.fixture(scope="module")
def watched(folder: Path, forking: ForkingProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has read all that a cell has to tell."""
    program("prometheus")
    port = free_port()
    with (
        reading(f"127.0.0.1:{port}", tmp_path_factory.mktemp("prometheus")) as prometheus,
        forking.server([str(folder), *TINY, *CELL], port=port) as server,
    ):
        prometheus.until("motet:worker_state")  # counters are read before they grow
        with ThreadPoolExecutor(2) as clients:
            list(clients.map(lambda seed: complete(server, seed=seed), range(4)))
        kill_the_writer(server)
        complete(server)
        prometheus.until('motet:migrations_total{cause="died"}')
        prometheus.until("sum(motet:engine_restarts_total) >= 1 and count(motet:num_groups_running) == 3")
        for name in ("http_requests", "routing_decisions"):  # series that begin with their first event
            prometheus.until(f"rate(motet:{name}_total[1m])")
        yield prometheus


def test_every_query_of_the_dashboard_finds_its_series(watched: Prometheus) -> None:
    empty = {
        title for title, expression in dashboard.queries() if not watched.ask(asked_by_grafana(expression, rate_s=60))
    }
    assert empty <= {FAILURES_PANEL}


def test_every_alert_is_evaluated_and_its_metrics_are_there(watched: Prometheus) -> None:
    alerts = ALERT.findall(RULES)
    assert eventually(watched.errors_of_rules, lambda errors: len(errors) == len(alerts)) == dict.fromkeys(alerts, "")
    assert asked_in(RULES) - watched.names() <= {FAILURES}


def test_the_loss_is_counted_by_its_cause_and_the_states_add_up(watched: Prometheus) -> None:
    (moved,) = watched.ask("motet:migrations_total")
    assert (moved["cause"], moved["outcome"]) == ("died", "resumed")
    states = watched.ask("sum by (worker) (motet:worker_state) == 1")
    assert [one["worker"] for one in states] == ["decode-0", "decode-1", "prefill-0"]


def test_no_counter_falls_when_an_engine_dies_and_another_takes_its_place(watched: Prometheus) -> None:
    counters = [name for name in watched.names() if re.search("_(total|bucket|count|sum)$", name)]
    assert len(counters) > 80
    assert not [name for name in counters if watched.ask(f"resets({name}[1h]) > 0")]


def test_variables_of_the_dashboard_have_values(watched: Prometheus) -> None:
    _, *asked = dashboard.variables()
    for variable in asked:
        found = re.fullmatch(r"label_values\((\S+), (\w+)\)", str(variable["definition"]))
        assert found is not None
        series = watched.ask(found[1])
        assert series and all(one.get(found[2]) for one in series)


def test_metrics_of_vllm_have_one_series_a_server(watched: Prometheus) -> None:
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"):
        assert len(watched.ask(f"vllm:{name}")) == 1


def test_the_alerts_fire_when_they_should_and_not_before() -> None:
    told = promtool("test", "rules", Path(__file__).with_name("rules_test.yml"))
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.parametrize(("kind", "file"), [("rules", "rules.yml"), ("config", "prometheus.yml")])
def test_promtool_finds_no_fault(kind: str, file: str) -> None:
    told = promtool("check", kind, DEPLOY / file)
    assert told.returncode == 0, told.stdout + told.stderr
