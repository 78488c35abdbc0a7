"""Any reader of Prometheus' formats can read the metrics of one server, a cell and a gateway, under both prefixes."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain
from prometheus_client.samples import Sample

from motet.engine_info import AdapterInfo
from motet.ids import ModelName
from motet.metrics.declare import MetricPrefix
from motet.metrics.prometheus import Exposition, Metrics, Scrape
from motet.metrics.routing import RoutingFigures
from motet.metrics.stats import EngineStats
from motet.testing.fake_engine import fake_info
from motet.types import FinishReason, Role
from tests.boards.reading import promtool
from tests.metrics.shown import ShownChoice, TimedGroup, engine_sample

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"
READS_BOTH = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
"""The header that Prometheus sends."""
STATS = EngineStats(steps=3, transfer_failures={"stale": 2})
ROUTING = RoutingFigures(
    choices={"decode-0": 1},
    client_choices={"key-0": 1},
    client_blocks={"key-0": 1},
    client_queued_choices={"key-0": 1},
    restarts={"decode-0": 1},
    weight_updates={"applied": 1},
    decisions={"load": 1},
    migrations={("died", "resumed"): 1},
    bypasses={"short": 1},
    pull_fallbacks={"late": 1},
    tickets_unused={"left": 1},
)
READY = {("engine-0", "ready"): True}
ADAPTER = AdapterInfo(name=ModelName("poet"), digest="d", rank=8)
WITH_ADAPTER = msgspec.structs.replace(fake_info(max_adapters=1), adapters=(ADAPTER,))
SERVERS = {
    "one server": Scrape(engines=[engine_sample(stats=STATS)], states={("engine-0", "ready"): True}),
    "cell": Scrape(
        engines=[
            engine_sample("prefill-0", STATS, role=Role.PREFILL),
            engine_sample("decode-0", STATS, role=Role.DECODE),
            engine_sample("decode-1", role=Role.DECODE),
        ],
        routing=ROUTING,
        states={("prefill-0", "ready"): True},
    ),
    "adapters": Scrape(engines=[engine_sample(stats=STATS, info=WITH_ADAPTER)], routing=ROUTING, states=READY),
    "gateway": Scrape(routing=ROUTING, states={("b-0", "ready"): True}),
}
every_server = pytest.mark.parametrize("server", SERVERS)
either_prefix = pytest.mark.parametrize("prefix", MetricPrefix)


def metrics_of(server: str, prefix: MetricPrefix, *, accept: str = "") -> Exposition:
    metrics, models = Metrics(prefix), ["m", "other"] if server == "gateway" else ["m"]
    group = TimedGroup(metrics.of("m"), 1)
    group.step([ShownChoice(0, FinishReason.STOP)], 1.0)
    group.end(2.0, tokens={0: 3})
    metrics.http_request(handler="/health", method="GET", status=200)
    return metrics.exposition(SERVERS[server], models=models, waiting=1, tasks=1, accept=accept)


def samples(text: str, *, as_openmetrics: bool) -> list[Sample]:
    parse = openmetrics if as_openmetrics else plain
    return [sample for family in parse(text) for sample in family.samples]


@pytest.mark.prometheus
@every_server
@either_prefix
def test_promtool_finds_no_error_except_the_colon_in_vllm_s_names(server: str, prefix: MetricPrefix) -> None:
    result = promtool("check", "metrics", stdin=metrics_of(server, prefix).body.decode())
    lines = (result.stdout + result.stderr).splitlines()
    lines = [line for line in lines if not line.startswith("vllm:iteration_tokens_total ")]  # a histogram, as in vLLM
    assert [line for line in lines if not line.endswith(" metric names should not contain ':'")] == []
    assert len(lines) > 30


@every_server
@either_prefix
def test_readers_of_openmetrics_get_the_same_samples(server: str, prefix: MetricPrefix) -> None:
    text, other = metrics_of(server, prefix), metrics_of(server, prefix, accept=READS_BOTH)
    assert text.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert other.content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    found = samples(text.body.decode(), as_openmetrics=False)
    assert found == samples(other.body.decode(), as_openmetrics=True)
    for exposition in (text, other):
        heads = re.findall(r"^# (?:HELP|TYPE) \S+", exposition.body.decode(), re.MULTILINE)
        assert len(heads) == len(set(heads)) > 60


@pytest.mark.parametrize(
    "accept", ["", "*/*", "text/plain;version=1.0.0", "text/html, application/openmetrics-textual"]
)
def test_all_other_readers_get_text(accept: str) -> None:
    assert metrics_of("cell", MetricPrefix.MOTET, accept=accept).content_type.startswith("text/plain; version=0.0.4")


def test_a_version_that_is_not_a_number_is_ignored() -> None:
    exposition = metrics_of("cell", MetricPrefix.MOTET, accept="application/openmetrics-text; version=x")
    assert exposition.body.endswith(b"# EOF\n")


SECTIONS: dict[str, set[str]] = {
    "Workers": {"model_name", "worker", "role"},
    "Separate prefill and decode": {"model_name", "worker", "role"},
    "Routing": {"model_name"},
    "Groups and choices": {"model_name"},
    "Batches": set(),
    "HTTP": set(),
    "Under vLLM's names": {"model_name", "engine"},
}
"""The labels that all metrics of a section of the page have."""
ROW = re.compile(r"\| `([a-z]+:\w+)` \| [^|]* \| [^|]* \| [^|]*?(?: By ([^|]*)\.)? \|")


def labels_on_the_page() -> Iterator[tuple[str, set[str]]]:
    for section in re.split(r"^##+ ", DOC.read_text(), flags=re.MULTILINE):
        for name, own in ROW.findall(section):
            yield name, SECTIONS[section.partition("\n")[0]] | set(re.findall(r"\w+", own))


def test_samples_have_the_labels_that_the_page_lists() -> None:
    documented = dict(labels_on_the_page())
    for name in ("vllm:cache_config_info", "vllm:lora_requests_info"):
        documented[name] -= {"model_name"}  # as in vLLM
    documented["vllm:lora_requests_info"] -= {"engine"}
    found = {}
    for family in plain(metrics_of("adapters", MetricPrefix.VLLM).body.decode()):
        (labels,) = {frozenset(one.labels) - {"le"} for one in family.samples}
        found[family.name + ("_total" if family.type == "counter" else "")] = labels
    assert found == documented
