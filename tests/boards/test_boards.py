"""The dashboard and the alerts use declared metrics, and each alert has a test of its own."""

import json
import re
from pathlib import Path

from motet.metrics import prometheus
from motet.metrics.declare import PREFIX, Declared, MetricKind, declared_in
from motet.metrics.group_metrics import COUNTED, OBSERVED
from motet.metrics.routing import RoutingFigures
from motet.metrics.stats import EngineStats
from tools import dashboard

ROOT = Path(__file__).parents[2]
RULES = (ROOT / "deploy" / "prometheus" / "rules.yml").read_text()
RULES_TEST = (Path(__file__).parent / "rules_test.yml").read_text()
ALERT = re.compile(r"- alert: (\w+)")
DECLARED = [
    *(declared for struct in (EngineStats, RoutingFigures) for _, declared in declared_in(struct)),
    *OBSERVED,
    *COUNTED,
    *(one for one in vars(prometheus).values() if isinstance(one, Declared)),
]


def metrics_in(text: str) -> set[str]:
    return set(re.findall(rf"{PREFIX}\w+", text))


def series() -> set[str]:
    """Returns the names of all samples that a server can have."""
    parts = {MetricKind.HISTOGRAM: ("_bucket", "_sum", "_count")}
    return {one.exposed_name + part for one in DECLARED for part in parts.get(one.kind, ("",))}


def test_the_dashboard_is_the_declared_one() -> None:
    assert dashboard.FILE.read_text() == dashboard.text(), "run python tools/dashboard.py"


def test_every_metric_that_is_used_is_declared() -> None:
    used = metrics_in(dashboard.FILE.read_text()) | metrics_in(RULES) | metrics_in(RULES_TEST)
    assert len(used) > 40
    assert used - series() == set()


def test_the_dashboard_shows_all_metrics_of_clients() -> None:
    of_clients = {one.exposed_name for one in DECLARED if one.labels == ("client",)}
    assert len(of_clients) == 3
    assert of_clients <= metrics_in(dashboard.text())


def test_panels_have_distinct_numbers_and_do_not_overlap() -> None:
    panels = json.loads(dashboard.FILE.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken
        taken |= cells


def test_every_alert_is_complete_and_tested_for_firing_and_for_not_firing() -> None:
    alerts = ALERT.findall(RULES)
    assert len(alerts) == len(set(alerts)) > 8
    for part in ("for: ", "severity: ", "summary: "):
        assert RULES.count(part) == len(alerts)
    assert re.findall(r"alertname: (\w+), .*exp_alerts: \[\]", RULES_TEST) == alerts
    assert re.findall(r"alertname: (\w+)\n *eval_time: \w+\n *exp_alerts:\n", RULES_TEST) == alerts
