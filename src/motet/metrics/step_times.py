"""How long steps take, as a histogram that costs little to add to: it is added to at every step of every group.

prometheus_client's own takes a lock for every bucket it looks at.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from motet.metrics.cumulative import cumulative


class StepTimes(Collector):
    """Written and read on one event loop."""

    def __init__(self, name: str, help: str, *, bounds: Sequence[float], model: str) -> None:
        self._name = name
        self._help = help
        self._bounds = bounds
        self._model = model
        self._counts = [0] * (len(bounds) + 1)
        """Of times above the bound before and not above this one; the last: above all."""
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum_s += seconds

    def collect(self) -> Iterator[Metric]:
        metric = HistogramMetricFamily(self._name, self._help, labels=("model_name",))
        metric.add_metric((self._model,), cumulative(self._bounds, self._counts), self._sum_s)
        yield metric
