"""The metrics of one server, in a registry of its own, in Prometheus' formats.

engines      read from `Engine.stats()` of each worker at each scrape: the fields of `EngineStats`; counters
             outlive the engines (`metrics.engines`)
routing      read from the router at each scrape: the fields of `RoutingFigures`
groups       observed at each step of a group and at its end, by model (`metrics.group_metrics`)
batches      read from the store of batches at each scrape: the fields of `BatchFigures`
HTTP         counted here when a response has been sent

With `--metric-prefix vllm`, metrics that vLLM has are also exposed under vLLM's names and labels. Clients such as the
endpoint picker of Kubernetes' inference gateways read the first series that they find on a server, so these series
describe the server: the sum over its workers."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from motet.metrics.batch_figures import BatchFigures
from motet.metrics.declare import (
    VLLM_PREFIX,
    Declared,
    MetricKind,
    MetricPrefix,
    aliases_in,
    counter,
    declared_in,
    gauge,
    histogram,
    numbers,
)
from motet.metrics.engines import EngineCounters, EngineSample
from motet.metrics.group_metrics import (
    ENGINE,
    INFINITY,
    MODEL,
    ONE_ENGINE,
    GroupFamilies,
    GroupMetrics,
    buckets_of,
    family,
    family_of,
)
from motet.metrics.routing import RoutingFigures
from motet.metrics.stats import EngineStats, total_stats

LabelValues = tuple[str, ...]
WORKER_LABELS = (MODEL, "worker", "role")
OPENMETRICS = "application/openmetrics-text"
WITH_COLONS = "version=1.0.0; escaping=allow-utf-8"
"""Options without which prometheus_client 0.26 replaces the colon by `_` in names of samples, but not of families."""

CACHE_FACTS = gauge(
    "cache_config_info",
    "1",
    "Properties of the KV cache, as labels; present while the worker has an engine.",
    labels=("block_size", "num_blocks", "bytes_per_block"),
)
CACHE_FACTS_IN_VLLM = gauge(
    "cache_config_info",
    "1",
    "Properties of the KV cache, as labels: tokens per block, and blocks of all workers.",
    labels=("block_size", "num_gpu_blocks"),
    prefix=VLLM_PREFIX,
)
"""The two labels of vLLM's metric that other programs read. vLLM's has many more, but not the model's name."""
TRANSFER_SIZES = (
    histogram("nixl_bytes_transferred", "bytes", "KV bytes of a successful pull, without buckets.", prefix=VLLM_PREFIX),
    histogram(
        "nixl_num_descriptors",
        "descriptors",
        "Memory ranges read by a successful pull, without buckets.",
        prefix=VLLM_PREFIX,
    ),
)
WEIGHT_VERSION = gauge(
    "weight_version_info", "1", "Version of the worker's current weights, as a label.", labels=("version",)
)
ADAPTERS = gauge(
    "adapter_info",
    "1",
    "Adapters that the worker has loaded now, with their versions, as labels.",
    labels=("adapter", "version"),
)
ADAPTERS_IN_VLLM = gauge(
    "lora_requests_info",
    "1",
    "Maximum number of adapters, and adapters with running and with waiting requests, as labels.",
    labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
    prefix=VLLM_PREFIX,
)
"""Present while adapters are loaded. Routers such as llm-d's prefer servers that run an adapter already."""
WORKER_STATE = gauge(
    "worker_state",
    "0 or 1",
    "1 for the state of the worker, as in `/status`, 0 for all other states.",
    labels=("worker", "state"),
)
WITHOUT_FIRST_TOKEN = gauge(
    "groups_without_first_token",
    "groups",
    "Admitted groups without a first token, which `--max-waiting-groups` limits.",
)
LOOP_TASKS = gauge(
    "event_loop_tasks",
    "tasks",
    "Tasks of asyncio in the server process: a constant number, and a few per connection and group.",
)
HTTP_REQUESTS = counter(
    "http_requests",
    "responses",
    "Responses sent; with status 499 if the client disconnected first.",
    labels=("handler", "method", "status"),
)


@dataclass(frozen=True, kw_only=True)
class Scrape:
    """The metrics of engines and routing at one scrape."""

    engines: Sequence[EngineSample] = ()
    sampled_s: float = 0.0
    """Time of the server's clock at the start of the scrape."""
    routing: RoutingFigures = field(default_factory=RoutingFigures)
    batches: BatchFigures = field(default_factory=BatchFigures)
    states: Mapping[tuple[str, str], bool] = field(default_factory=dict)
    """True for each (worker, state) if the worker is in the state."""


class Exposition(NamedTuple):
    """The body of `/metrics` and its content type."""

    body: bytes
    content_type: str


def exposed(
    metrics: Sequence[tuple[str, Declared]], samples: Sequence[tuple[LabelValues, object]], *, labels: tuple[str, ...]
) -> Iterator[Metric]:
    """Yields metrics of structs. `metrics`: pairs (field, declaration); `samples`: pairs (label values, struct)."""
    for name, declared in metrics:
        if declared.kind is MetricKind.HISTOGRAM:
            histogram = HistogramMetricFamily(declared.family_name, declared.meaning, labels=labels)
            for values, figures in samples:
                buckets = buckets_of(declared.bounds, getattr(figures, name))
                histogram.add_metric(values, buckets, getattr(figures, declared.sum_in))
            yield histogram
            continue
        metric = family(declared, labels)
        for values, figures in samples:
            for own, number in numbers(figures, name, declared=declared).items():
                metric.add_metric((*values, *own), number)
        yield metric


class Metrics(Collector):
    """All metrics of one app, as a collector of the values of the last scrape."""

    def __init__(self, prefix: MetricPrefix = MetricPrefix.MOTET) -> None:
        self.registry = CollectorRegistry()
        self._as_vllm = prefix is MetricPrefix.VLLM
        self._scrape = Scrape()
        self._counters = EngineCounters()
        self._families = GroupFamilies(self.registry, aliases=self._as_vllm)
        self._by_model: dict[str, GroupMetrics] = {}
        """Metrics of every model that was ever served; a model that is removed keeps its counts."""
        self.registry.register(self)
        self._http: Counter[tuple[str, ...]] = Counter()
        self._waiting = self._tasks = 0

    def of(self, model: str) -> GroupMetrics:
        """Returns a model's metrics. `model` must be a served model: each name takes memory forever."""
        if (found := self._by_model.get(model)) is None:
            found = self._by_model[model] = GroupMetrics(self._families, model)
        return found

    def http_request(self, *, handler: str, method: str, status: int) -> None:
        self._http[handler, method, str(status)] += 1

    def exposition(
        self, scrape: Scrape, *, models: Iterable[str], waiting: int, tasks: int, accept: str = ""
    ) -> Exposition:
        """Returns the body of `/metrics`.

        `models` are the models served now, which are exposed from the first scrape on; `waiting` is the number of
        groups without a first token, `tasks` the number of tasks in the event loop, `accept` the client's header."""
        for model in models:
            self.of(model)
        self._scrape, self._waiting, self._tasks = scrape, waiting, tasks
        self._counters.note(scrape.engines, sampled_s=scrape.sampled_s)
        if OPENMETRICS not in (kind.partition(";")[0].strip() for kind in accept.split(",")):
            return Exposition(generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4)
        encode, _ = choose_encoder(f"{OPENMETRICS}; {WITH_COLONS}")
        return Exposition(encode(self.registry), CONTENT_TYPE_LATEST)

    def collect(self) -> Iterator[Metric]:
        scrape = self._scrape
        model = next(iter(self._by_model)) if len(self._by_model) == 1 else ""  # empty once there were several
        workers = [((model, sample.worker, sample.role.value), sample) for sample in scrape.engines]
        now = [(labels, sample.stats) for labels, sample in workers if sample.stats is not None]
        ever = [(labels, figures) for labels, sample in workers if (figures := self._counters.of(sample.worker))]
        yield from engine_families(declared_in(EngineStats), now=now, ever=ever, labels=WORKER_LABELS)
        infos = [(labels, sample.info) for labels, sample in workers if sample.info is not None]
        facts, versions = family(CACHE_FACTS, WORKER_LABELS), family(WEIGHT_VERSION, WORKER_LABELS)
        adapters = family(ADAPTERS, WORKER_LABELS)
        for labels, info in infos:
            facts.add_metric([*labels, *(str(getattr(info, name)) for name in CACHE_FACTS.labels)], 1)
            versions.add_metric([*labels, info.weight_version], 1)
            for adapter in info.adapters:
                adapters.add_metric([*labels, adapter.name, adapter.version], 1)
        yield from (facts, versions, adapters)
        states = scrape.states.items()
        yield family_of(WORKER_STATE, {(model, *state): int(current) for state, current in states}, labels=(MODEL,))
        yield from exposed(declared_in(RoutingFigures), [((model,), scrape.routing)], labels=(MODEL,))
        yield from exposed(declared_in(BatchFigures), [((), scrape.batches)], labels=())
        yield family_of(HTTP_REQUESTS, self._http, labels=())
        yield family_of(WITHOUT_FIRST_TOKEN, {(model,): self._waiting}, labels=(MODEL,))
        yield family_of(LOOP_TASKS, {(): self._tasks}, labels=())
        if self._as_vllm:
            yield from as_vllm(scrape, self._counters.total(), model=model)


def engine_families(
    metrics: Sequence[tuple[str, Declared]],
    *,
    now: Sequence[tuple[LabelValues, EngineStats]],
    ever: Sequence[tuple[LabelValues, EngineStats]],
    labels: tuple[str, ...],
) -> Iterator[Metric]:
    """Yields gauges with the samples in `now`, and counters and histograms with the samples in `ever`."""
    yield from exposed([metric for metric in metrics if metric[1].kind is MetricKind.GAUGE], now, labels=labels)
    yield from exposed([metric for metric in metrics if metric[1].kind is not MetricKind.GAUGE], ever, labels=labels)


def as_vllm(scrape: Scrape, totals: EngineStats | None, *, model: str) -> Iterator[Metric]:
    """Yields the metrics of the engines under vLLM's names: gauges while an engine answers, and counters from
    `totals`, the totals of all engines (None if none has ever answered)."""
    answers = [sample.stats for sample in scrape.engines if sample.stats is not None]
    total = total_stats(answers)
    # Choices wait in the router until a worker has capacity; in vLLM they always wait in the engine.
    total = replace(total, choices_waiting=total.choices_waiting + scrape.routing.queued_choices)
    values = (model, ONE_ENGINE)
    now, ever = [(values, total)] if answers else [], [] if totals is None else [(values, totals)]
    yield from engine_families(aliases_in(EngineStats), now=now, ever=ever, labels=(MODEL, ENGINE))
    yield from exposed(aliases_in(RoutingFigures), [(values, scrape.routing)], labels=(MODEL, ENGINE))
    yield from _sizes_of_transfers(EngineStats() if totals is None else totals, values)
    facts = family(CACHE_FACTS_IN_VLLM, (ENGINE,))
    if infos := [sample.info for sample in scrape.engines if sample.info is not None]:
        facts.add_metric([ONE_ENGINE, str(infos[0].block_size), str(sum(info.num_blocks for info in infos))], 1)
    yield facts
    adapters = family(ADAPTERS_IN_VLLM, ())
    if any(info.adapters for info in infos):
        maximum = str(min(info.max_adapters for info in infos))
        routing = scrape.routing
        adapters.add_metric([maximum, ",".join(routing.adapters_waiting), ",".join(routing.adapters_running)], 1)
    yield adapters


def _sizes_of_transfers(stats: EngineStats, values: LabelValues) -> Iterator[Metric]:
    """Yields vLLM's histograms of pulls for which Motet has only sums. They have no buckets; their means, which
    vLLM's dashboards show, are exact."""
    for declared, total in zip(TRANSFER_SIZES, (stats.transfer_bytes, stats.transfer_descriptors), strict=True):
        histogram = HistogramMetricFamily(declared.family_name, declared.meaning, labels=(MODEL, ENGINE))
        histogram.add_metric(values, [(INFINITY, stats.transfers)], total)
        yield histogram
