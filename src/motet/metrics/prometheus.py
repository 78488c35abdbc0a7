"""The metrics of one server, in a registry of their own, as Prometheus reads them.

engines      read from `Engine.stats()` of each worker at each scrape: the fields of `EngineStats`
routing      read from the router at each scrape: the fields of `RoutingFigures`
groups       observed when a step of a group comes and when the group ends, by model (`metrics.groups`)
HTTP         counted here when a response has been sent

With `--metric-prefix vllm` the metrics that vLLM has too are there a second time, under its names and with its labels.
Readers such as the endpoint picker of Kubernetes' inference gateways take one series a server, the first that they
find, so these are figures of the server: the sum over its workers.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from motet.metrics.declare import (
    VLLM_PREFIX,
    Declared,
    MetricKind,
    MetricPrefix,
    aliases_in,
    counter,
    declared_in,
    gauge,
    numbers,
)
from motet.metrics.groups import (
    ENGINE,
    MODEL,
    ONE_ENGINE,
    GroupFamilies,
    GroupMetrics,
    buckets_of,
    counted,
    family,
    histogram_family,
)
from motet.metrics.routing import RoutingFigures
from motet.stats import EngineStats, total_stats
from motet.types import EngineInfo

WORKER_LABELS = (MODEL, "worker", "role")

CACHE_FACTS = gauge(
    "cache_config_info",
    "1",
    "Facts of the KV cache, in labels; there while the worker has an engine.",
    labels=("block_size", "num_blocks", "bytes_per_block"),
)
CACHE_FACTS_IN_VLLM = gauge(
    "cache_config_info",
    "1",
    "Facts of the KV cache, in labels: tokens of a block, and blocks of all workers.",
    labels=("block_size", "num_gpu_blocks"),
    prefix=VLLM_PREFIX,
)
"""vLLM's has many labels more; these two are what others read."""
WEIGHT_VERSION = gauge(
    "weight_version_info",
    "1",
    "The version of the weights that the worker has now, in a label.",
    labels=("version",),
)
WORKER_STATE = gauge(
    "worker_state",
    "0 or 1",
    "1 for the state that the worker is in, as in `/status`, 0 for the others.",
    labels=("worker", "state"),
)
WITHOUT_FIRST_TOKEN = gauge(
    "groups_without_first_token",
    "groups",
    "Groups admitted that have no first token yet: what `--max-waiting-groups` limits.",
)
LOOP_TASKS = gauge(
    "event_loop_tasks",
    "tasks",
    "Tasks of asyncio in the server's process: some for itself, a few for each connection and group.",
)
HTTP_REQUESTS = counter(
    "http_requests",
    "responses",
    "Responses sent; 499 if the client left before.",
    labels=("handler", "method", "status"),
)


@dataclass(frozen=True)
class EngineSample:
    """A worker whose figures are published here."""

    worker: str
    info: EngineInfo
    stats: EngineStats | None = None
    """None if it did not answer; then it has no samples."""


@dataclass(frozen=True, kw_only=True)
class Scrape:
    """The figures of engines and routing for one scrape."""

    engines: Sequence[EngineSample] = ()
    routing: RoutingFigures = field(default_factory=RoutingFigures)
    states: Mapping[tuple[str, str], bool] = field(default_factory=dict)
    """(worker, state) for all workers and states: True if the worker is in the state."""


def exposed(
    metrics: Sequence[tuple[str, Declared]],
    samples: Sequence[tuple[tuple[str, ...], object]],
    *,
    labels: tuple[str, ...],
) -> Iterator[Metric]:
    """Yields metrics that are declared in a struct, each with the name of its field. `samples`: the values of `labels`,
    with the figures for them."""
    for name, declared in metrics:
        if declared.kind is MetricKind.HISTOGRAM:
            histogram = histogram_family(declared, labels)
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
    """All metrics of one app. The registry collects the values of the last scrape from here."""

    def __init__(self, prefix: MetricPrefix = MetricPrefix.MOTET) -> None:
        self.registry = CollectorRegistry()
        self._as_vllm = prefix is MetricPrefix.VLLM
        self._scrape = Scrape()
        self._families = GroupFamilies(self.registry, aliases=self._as_vllm)
        self._by_model: dict[str, GroupMetrics] = {}
        """Every model that was ever served; a model that has gone keeps its counts."""
        self.registry.register(self)
        self._http: Counter[tuple[str, ...]] = Counter()
        self._waiting = self._tasks = 0

    def of(self, model: str) -> GroupMetrics:
        """Returns a model's metrics. `model` must be one that is served: each name costs memory for ever."""
        if (found := self._by_model.get(model)) is None:
            found = self._by_model[model] = GroupMetrics(self._families, model)
        return found

    def http_request(self, *, handler: str, method: str, status: int) -> None:
        self._http[handler, method, str(status)] += 1

    def exposition(self, scrape: Scrape, *, models: Iterable[str], waiting: int, tasks: int) -> bytes:
        """Returns the text of `/metrics`. `models`: the models served now, which are in it from the first scrape on;
        `waiting`: groups without their first token; `tasks`: tasks in the event loop."""
        for model in models:
            self.of(model)
        self._scrape, self._waiting, self._tasks = scrape, waiting, tasks
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        scrape = self._scrape
        model = next(iter(self._by_model)) if len(self._by_model) == 1 else ""  # empty once there were several
        workers = [((model, one.worker, one.info.role.value), one) for one in scrape.engines]
        answers = [(labels, one.stats) for labels, one in workers if one.stats is not None]
        yield from exposed(declared_in(EngineStats), answers, labels=WORKER_LABELS)
        facts = family(CACHE_FACTS, WORKER_LABELS)
        for labels, one in workers:
            facts.add_metric([*labels, *(str(getattr(one.info, name)) for name in CACHE_FACTS.labels)], 1)
        yield facts
        versions = family(WEIGHT_VERSION, WORKER_LABELS)
        for labels, one in workers:
            versions.add_metric([*labels, one.info.weight_version], 1)
        yield versions
        states = family(WORKER_STATE, (MODEL,))
        for (worker, state), is_so in scrape.states.items():
            states.add_metric((model, worker, state), int(is_so))
        yield states
        yield from exposed(declared_in(RoutingFigures), [((model,), scrape.routing)], labels=(MODEL,))
        yield counted(HTTP_REQUESTS, self._http, labels=())
        waiting = family(WITHOUT_FIRST_TOKEN, (MODEL,))
        waiting.add_metric((model,), self._waiting)
        yield waiting
        tasks = family(LOOP_TASKS, ())
        tasks.add_metric((), self._tasks)
        yield tasks
        if self._as_vllm:
            yield from as_vllm(scrape, model)


def as_vllm(scrape: Scrape, model: str) -> Iterator[Metric]:
    """Yields the metrics of the engines under vLLM's names; without samples while no engine answers."""
    answers = [one.stats for one in scrape.engines if one.stats is not None]
    total = total_stats(answers)
    # Choices wait in the router until a worker has room, and in vLLM always in the engine.
    total = replace(total, choices_waiting=total.choices_waiting + scrape.routing.queued_choices)
    labels, values = (MODEL, ENGINE), (model, ONE_ENGINE)
    yield from exposed(aliases_in(EngineStats), [(values, total)] if answers else [], labels=labels)
    facts = family(CACHE_FACTS_IN_VLLM, labels)
    if infos := [one.info for one in scrape.engines]:
        facts.add_metric([*values, str(infos[0].block_size), str(sum(info.num_blocks for info in infos))], 1)
    yield facts
