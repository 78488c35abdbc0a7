"""Figures that others keep, the engines and whoever routes between them: read when the metrics are scraped."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from motet.metrics.cumulative import cumulative
from motet.metrics.names import ENGINE_COUNTS, ENGINE_FIGURES, ENGINE_HISTOGRAMS, PREFIX, Kind
from motet.metrics.routing import RoutingFigures
from motet.metrics.routing_exposed import routing_metrics, worker_states
from motet.types import EngineInfo, EngineStats

LABELS = ("model_name", "worker", "role")


@dataclass(frozen=True)
class EngineSample:
    """A worker whose figures are published here."""

    worker: str
    info: EngineInfo
    stats: EngineStats | None = None
    """None: it gave no answer, and has no samples."""


@dataclass(frozen=True, kw_only=True)
class Scrape:
    """What the others said this time."""

    engines: Sequence[EngineSample] = ()
    routing: RoutingFigures = field(default_factory=RoutingFigures)
    states: Mapping[tuple[str, str], bool] = field(default_factory=dict)
    """Every worker with every state there is, and whether it is in it."""


class ScrapeCollector(Collector):
    """Exposes the last scrape, with the labels of each worker."""

    def __init__(self) -> None:
        self.scrape = Scrape()
        self.model = ""
        """What all of it is labelled with."""

    def collect(self) -> Iterator[Metric]:
        answers = [(self._labels(said), said.stats) for said in self.scrape.engines if said.stats is not None]
        for figure in ENGINE_FIGURES:
            family = CounterMetricFamily if figure.kind is Kind.COUNTER else GaugeMetricFamily
            metric: CounterMetricFamily | GaugeMetricFamily = family(PREFIX + figure.name, figure.help, labels=LABELS)
            for labels, stats in answers:
                metric.add_metric(labels, figure.read(stats))
            yield metric
        for counts in ENGINE_COUNTS:
            counter = CounterMetricFamily(PREFIX + counts.name, counts.help, labels=(*LABELS, counts.label))
            for labels, stats in answers:
                for value, count in counts.read(stats).items():
                    counter.add_metric((*labels, value), count)
            yield counter
        for kept in ENGINE_HISTOGRAMS:
            histogram = HistogramMetricFamily(PREFIX + kept.name, kept.help, labels=LABELS)
            for labels, stats in answers:
                histogram.add_metric(labels, cumulative(kept.bounds, kept.read(stats)), kept.sum(stats))
            yield histogram
        yield self._cache_facts()
        yield worker_states(self.model, self.scrape.states)
        yield from routing_metrics(self.model, self.scrape.routing)

    def _labels(self, said: EngineSample) -> tuple[str, str, str]:
        return self.model, said.worker, said.info.role.value

    def _cache_facts(self) -> Metric:
        facts = ("block_size", "num_blocks", "bytes_per_block")
        metric = GaugeMetricFamily(PREFIX + "cache_config_info", "The KV cache, in labels.", labels=(*LABELS, *facts))
        for said in self.scrape.engines:
            values = (said.info.block_size, said.info.num_blocks, said.info.bytes_per_block)
            metric.add_metric((*self._labels(said), *map(str, values)), 1)
        return metric
