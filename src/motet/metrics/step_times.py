"""How long steps take, as a histogram that costs little to add to: it is added to at every step of every group.

prometheus_client's own takes a lock for every bucket it looks at.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from motet.metrics.cumulative import cumulative


class StepTimes:
    """Of the groups of one model. Written and read on one event loop."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Of times above the bound before and not above this one; the last: above all."""
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum_s += seconds


class StepTimesByModel(Collector):
    """One histogram, with the model as its label."""

    def __init__(self, name: str, help: str, *, bounds: Sequence[float]) -> None:
        self._name = name
        self._help = help
        self._bounds = bounds
        self._times: dict[str, StepTimes] = {}

    def of(self, model: str) -> StepTimes:
        return self._times.setdefault(model, StepTimes(self._bounds))

    def collect(self) -> Iterator[Metric]:
        metric = HistogramMetricFamily(self._name, self._help, labels=("model_name",))
        for model, times in self._times.items():
            metric.add_metric((model,), cumulative(times.bounds, times.counts), times.sum_s)
        yield metric
