"""Figures that others keep, the engines and whoever routes between them: read when the metrics are scraped."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from motet.metrics.names import ENGINE_COUNTS, ENGINE_FIGURES, ENGINE_HISTOGRAMS, PREFIX, EngineHistogram, Kind
from motet.types import EngineInfo, EngineStats

LABELS = ("model_name", "worker", "role")
INFINITY = "+Inf"


@dataclass(frozen=True)
class Scrape:
    """What the others said this time."""

    stats: Mapping[str, EngineStats] = field(default_factory=dict)
    """By worker; one that gave no answer is left out, and so are its samples."""
    bypasses: Mapping[str, int] = field(default_factory=dict)
    """Groups that did without prefill workers, by reason."""


class ScrapeCollector(Collector):
    """Exposes the last scrape, with the labels of each worker."""

    def __init__(self, model: str, workers: Mapping[str, EngineInfo]) -> None:
        self.scrape = Scrape()
        self._model = model
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        answers = [(self._labels(worker), stats) for worker, stats in self.scrape.stats.items()]
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
                histogram.add_metric(labels, cumulative(kept, stats), kept.sum(stats))
            yield histogram
        yield self._bypasses()
        yield self._cache_facts()

    def _labels(self, worker: str) -> tuple[str, str, str]:
        return self._model, worker, self._workers[worker].role.value

    def _bypasses(self) -> Metric:
        metric = CounterMetricFamily(
            PREFIX + "bypasses", "Groups that did without prefill workers.", labels=("model_name", "reason")
        )
        for reason, count in self.scrape.bypasses.items():
            metric.add_metric((self._model, reason), count)
        return metric

    def _cache_facts(self) -> Metric:
        facts = ("block_size", "num_blocks", "bytes_per_block")
        metric = GaugeMetricFamily(PREFIX + "cache_config_info", "The KV cache, in labels.", labels=(*LABELS, *facts))
        for worker, info in self._workers.items():
            values = (info.block_size, info.num_blocks, info.bytes_per_block)
            metric.add_metric((*self._labels(worker), *map(str, values)), 1)
        return metric


def cumulative(histogram: EngineHistogram, stats: EngineStats) -> list[tuple[str, float]]:
    """Bound and how many values are not above it, as Prometheus has it."""
    counts = histogram.read(stats) or [0] * (len(histogram.bounds) + 1)
    bounds = [*map(str, histogram.bounds), INFINITY]
    return list(zip(bounds, accumulate(counts), strict=True))
