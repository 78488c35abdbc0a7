"""How a metric is declared: once, beside the field that holds its value.

    transfers: int = counter_field("kv_transfers", "pulls", "Pulls that brought what ...", in_status=True)

The field's name goes over the wire, from an engine to its server and on to gateways. From the declaration come the
exposition at `/metrics` (`metrics.prometheus`), the sum over several workers (`routing.router`), the field in `/status`
(`api.operators`) and the row in docs/metrics.md, which a test compares. Metrics that are observed
as things happen, and are in no struct, are declared as constants where they are observed (`metrics.group_metrics`,
`metrics.prometheus`).

Names that vLLM has too have the same meaning, with `motet:` in place of `vllm:`. A request of vLLM is a choice here,
since vLLM makes a request of every choice. A declaration says so by `in_vllm`, and `--metric-prefix vllm` then exposes
the value under vLLM's name as well.
"""

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
    """The names that `/metrics` has."""

    MOTET = "motet"
    """Ours."""
    VLLM = "vllm"
    """Ours, and beside them vLLM's for what vLLM counts too."""


class MetricKind(StrEnum):
    """Kinds of metrics in Prometheus."""

    COUNTER = "counter"
    """Only grows while the server lives."""
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, eq=False)
class Declared:
    """One metric. Its exposed name is `prefix` + `name`, and a counter's ends in `_total`."""

    name: str
    unit: str
    meaning: str
    """A sentence, which is shown in the exposition and in docs/metrics.md."""
    _: KW_ONLY
    kind: MetricKind
    labels: tuple[str, ...] = ()
    """Labels beside those of its source, such as the model. The field is then a mapping from label values."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets. Its field has one count for each bucket, and one more for larger values;
    it is empty while nothing has been counted."""
    sum_in: str = ""
    """The field with the sum of all values of a histogram."""
    share_of: str = ""
    """The field with the whole, if the metric is its own field's share of that."""
    highest: bool = False
    """True if the value of several workers is their highest one; else it is their sum."""
    in_status: bool = False
    """True if `/status` shows it under the field's name: a gauge with its worker, a counter among the totals."""
    in_vllm: bool = False
    """True if vLLM has a metric of this name, with the same meaning and unit."""
    once_in_vllm: str = ""
    """The name that the metric had in older versions of vLLM, if they called it otherwise."""
    prefix: str = PREFIX

    @property
    def family_name(self) -> str:
        """The name of the family, which Prometheus' text has in its comments: without `_total`."""
        return self.prefix + self.name

    @property
    def exposed_name(self) -> str:
        return self.family_name + ("_total" if self.kind is MetricKind.COUNTER else "")

    @property
    def aliases(self) -> tuple["Declared", ...]:
        """The same metric under each name that it has, or had, in vLLM."""
        names = filter(None, (self.name if self.in_vllm else "", self.once_in_vllm))
        return tuple(replace(self, name=name, prefix=VLLM_PREFIX, in_vllm=False, once_in_vllm="") for name in names)

    @property
    def row(self) -> str:
        """The row of docs/metrics.md."""
        by = " By " + ", ".join(f"`{label}`" for label in self.labels) + "." if self.labels else ""
        return f"| `{self.exposed_name}` | {self.kind} | {self.unit} | {self.meaning}{by} |"


counter = partial(Declared, kind=MetricKind.COUNTER)
gauge = partial(Declared, kind=MetricKind.GAUGE)
histogram = partial(Declared, kind=MetricKind.HISTOGRAM)


def figure(  # sizes: a table of figures is read by its rows
    name: str, unit: str, meaning: str, *, kind: MetricKind, also: Declared | None = None, default: Any = 0, **more: Any
) -> Any:
    """Declares a dataclass field as the value of a metric. `also`: another metric with the same value; `default`: the
    first value of a counter or gauge without labels (with labels it is a Counter); `more`: fields of `Declared`."""
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
    """Returns the metrics of a dataclass with the names of their fields, in the order of the fields."""
    named: Any = figures
    return tuple((one.name, declared) for one in fields(named) for declared in one.metadata.get(METADATA_KEY, ()))


@cache
def aliases_in(figures: type) -> Sequence[tuple[str, Declared]]:
    """Returns the same for the metrics that vLLM has too, under vLLM's names."""
    return tuple((field, alias) for field, declared in declared_in(figures) for alias in declared.aliases)


def numbers(figures: object, field: str, *, declared: Declared) -> Mapping[tuple[str, ...], float]:
    """Returns the values of a counter or gauge by label values; a missing one (None) is 0."""
    value = getattr(figures, field)
    if isinstance(value, Mapping):
        return {key if isinstance(key, tuple) else (key,): number for key, number in value.items()}
    if declared.share_of:
        whole = getattr(figures, declared.share_of)
        return {(): value / whole if whole else 0.0}
    return {(): value or 0}
