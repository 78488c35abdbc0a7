"""Declarations of metrics. A metric is declared once, next to the field that holds its value:

    transfers: int = counter_field("kv_transfers", "pulls", "Pulls that brought ...", in_status=True)

The field's name is used on the wire, from an engine to its server and on to gateways. The exposition at `/metrics`
(`metrics.prometheus`), the sum over several workers (`metrics.stats`), the field in `/status` (`api.operators`) and the
row in docs/metrics.md, which a test compares, follow from the declaration. Metrics that are observed as events happen
are declared as constants where they are observed (`metrics.group_metrics`, `metrics.prometheus`).

A metric with the name of a vLLM metric has its meaning, with the prefix `motet:` instead of `vllm:`. A vLLM request is
a choice here, since vLLM makes one request of every choice. With `in_vllm` in the declaration, `--metric-prefix vllm`
also exposes the value under vLLM's name."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from enum import StrEnum
from functools import cache, partial
from typing import Any, Final

PREFIX = "motet:"
VLLM_PREFIX = "vllm:"
METADATA_KEY: Final = "metrics"


class MetricPrefix(StrEnum):
    """The names of the metrics at `/metrics`."""

    MOTET = "motet"
    VLLM = "vllm"
    """Motet's names, and additionally vLLM's names of the metrics that vLLM has."""


class MetricKind(StrEnum):
    """Kinds of metrics in Prometheus."""

    COUNTER = "counter"
    """Never decreases while the server runs."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, eq=False)
class Declared:
    """One metric. Its exposed name is `prefix` + `name`, followed by `_total` for a counter."""

    name: str
    unit: str
    meaning: str
    """Sentence shown in the exposition and in docs/metrics.md."""
    _: KW_ONLY
    kind: MetricKind
    labels: tuple[str, ...] = ()
    """Labels in addition to the source's, such as the model. The field is then a mapping from label values."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets. Its field has one more count, for larger values, and is empty at first."""
    sum_in: str = ""
    """Name of the field with the sum of all values of a histogram."""
    share_of: str = ""
    """Name of the field with the total, if the metric is a fraction of it."""
    highest: bool = False
    """True if the value for several workers is their maximum instead of their sum."""
    in_status: bool = False
    """True if `/status` shows it under the field's name: a gauge with its worker, a counter among the totals."""
    in_vllm: bool = False
    """True if vLLM has a metric with this name, meaning and unit."""
    once_in_vllm: str = ""
    """Name of the metric in vLLM, or in older versions of vLLM, if it differs."""
    prefix: str = PREFIX

    @property
    def family_name(self) -> str:
        """Name of the metric family, as in the comments of Prometheus' text format: without `_total`."""
        return self.prefix + self.name

    @property
    def exposed_name(self) -> str:
        return self.family_name + ("_total" if self.kind is MetricKind.COUNTER else "")

    @property
    def aliases(self) -> tuple["Declared", ...]:
        """The metric under each name that it has, or had, in vLLM."""
        names = filter(None, (self.name if self.in_vllm else "", self.once_in_vllm))
        return tuple(replace(self, name=name, prefix=VLLM_PREFIX, in_vllm=False, once_in_vllm="") for name in names)

    @property
    def row(self) -> str:
        """Row of the table in docs/metrics.md."""
        by = " By " + ", ".join(f"`{label}`" for label in self.labels) + "." if self.labels else ""
        return f"| `{self.exposed_name}` | {self.kind} | {self.unit} | {self.meaning}{by} |"


counter = partial(Declared, kind=MetricKind.COUNTER)
gauge = partial(Declared, kind=MetricKind.GAUGE)
histogram = partial(Declared, kind=MetricKind.HISTOGRAM)


def figure(  # sizes: a table of metrics is read by its rows
    name: str, unit: str, meaning: str, *, kind: MetricKind, also: Declared | None = None, default: Any = 0, **more: Any
) -> Any:
    """Declares a dataclass field as the value of a metric.

    `also` is another metric with the same value, `default` the initial value of a counter or gauge without labels (with
    labels it is a `Counter`), and `more` has fields of `Declared`."""
    declared = Declared(name, unit, meaning, kind=kind, **more)
    metadata = {METADATA_KEY: (declared,) if also is None else (declared, also)}
    if declared.labels:
        return field(default_factory=Counter, metadata=metadata)
    return field(default=() if declared.bounds else default, metadata=metadata)


counter_field = partial(figure, kind=MetricKind.COUNTER)
gauge_field = partial(figure, kind=MetricKind.GAUGE)
histogram_field = partial(figure, kind=MetricKind.HISTOGRAM)


@cache
def declared_in(figures: type) -> Sequence[tuple[str, Declared]]:
    """Returns the field names and metrics of a dataclass, in the order of the fields."""
    dataclass: Any = figures
    return tuple((f.name, declared) for f in fields(dataclass) for declared in f.metadata.get(METADATA_KEY, ()))


@cache
def aliases_in(figures: type) -> Sequence[tuple[str, Declared]]:
    """Returns the field names and metrics of a dataclass under vLLM's names, for the metrics that vLLM has."""
    return tuple((field, alias) for field, declared in declared_in(figures) for alias in declared.aliases)


def numbers(figures: object, field: str, *, declared: Declared) -> Mapping[tuple[str, ...], float]:
    """Returns the values of a counter or gauge by label values; a missing value (None) is 0."""
    value = getattr(figures, field)
    if isinstance(value, Mapping):
        return {key if isinstance(key, tuple) else (key,): number for key, number in value.items()}
    if declared.share_of:
        total = getattr(figures, declared.share_of)
        return {(): value / total if total else 0.0}
    return {(): value or 0}
