"""Metrics of groups and choices, by model: observed when a group is admitted, at its steps, and at its end.

`GroupRecord` records the events of one group; `GroupMetrics` observes them for a model."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from motet.metrics.declare import Declared, MetricKind, counter, histogram
from motet.types import FinishReason

MODEL = "model_name"
ENGINE = "engine"
"""vLLM's label for data-parallel ranks."""
ONE_ENGINE = "0"
"""Value of the label `ENGINE` on a server without data-parallel ranks."""
INFINITY = "+Inf"

LONG_S = (1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
MINUTES_S = (60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, *LONG_S, 160.0, 640.0, 2560.0)
TOTAL_S = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, *MINUTES_S)
STEP_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, *LONG_S)
"""vLLM's bounds, extended at both ends: groups of trainers can wait and generate for many minutes."""
TOKENS = (1.0, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)
CHOICES = (1.0, 2, 4, 8, 16, 32, 64, 128, 256)

FIRST_TOKEN = histogram(
    "time_to_first_token_seconds",
    "seconds",
    "Time to the first token of a group's first choice.",
    in_vllm=True,
    bounds=FIRST_S,
)
LAST_FIRST_TOKEN = histogram(
    "time_to_first_token_last_choice_seconds",
    "seconds",
    "Time to the first token of a group's last choice.",
    bounds=FIRST_S,
)
FINISH_SPREAD = histogram(
    "finish_spread_seconds",
    "seconds",
    "Time from a group's first finished choice to its last, without choices that a policy never started.",
    bounds=TOTAL_S,
)
LATENCY = histogram(
    "e2e_request_latency_seconds", "seconds", "Time from a group's admission to its end.", in_vllm=True, bounds=TOTAL_S
)
BETWEEN_STEPS = histogram(
    "inter_token_latency_seconds", "seconds", "Time from one step of a group to its next.", in_vllm=True, bounds=STEP_S
)
PER_TOKEN = histogram(
    "request_time_per_output_token_seconds",
    "seconds",
    "Mean time per output token after the first; observed once per finished choice.",
    in_vllm=True,
    bounds=STEP_S,
)
PREFILL_TIME = histogram(
    "request_prefill_time_seconds",
    "seconds",
    "Time from the end of a group's wait for capacity to its first token.",
    in_vllm=True,
    bounds=TOTAL_S,
)
DECODE_TIME = histogram(
    "request_decode_time_seconds",
    "seconds",
    "Time from the first token of a finished choice to its end.",
    in_vllm=True,
    bounds=TOTAL_S,
)
INFERENCE_TIME = histogram(
    "request_inference_time_seconds",
    "seconds",
    "Time from the end of a group's wait for capacity to the end of a finished choice.",
    in_vllm=True,
    bounds=TOTAL_S,
)
PROMPT_TOKENS = histogram("request_prompt_tokens", "tokens", "Prompt tokens of a group.", in_vllm=True, bounds=TOKENS)
GENERATION_TOKENS = histogram(
    "request_generation_tokens", "tokens", "Output tokens of a finished choice.", in_vllm=True, bounds=TOKENS
)
N = histogram("request_params_n", "choices", "Choices of a group.", in_vllm=True, bounds=CHOICES)
MAX_TOKENS = histogram(
    "request_params_max_tokens", "tokens", "Maximum number of output tokens of a choice.", in_vllm=True, bounds=TOKENS
)
SUCCESS = counter("request_success", "choices", "Choices that finished.", in_vllm=True, labels=("finished_reason",))
GROUPS = counter(
    "groups",
    "groups",
    "Groups that ended, with status 200, 499 (the client disconnected) or the status of the error.",
    labels=("status",),
)

OBSERVED = (
    *(FIRST_TOKEN, LAST_FIRST_TOKEN, FINISH_SPREAD, LATENCY, PER_TOKEN),
    *(PREFILL_TIME, DECODE_TIME, INFERENCE_TIME),
    *(PROMPT_TOKENS, GENERATION_TOKENS, N, MAX_TOKENS, BETWEEN_STEPS),
)
COUNTED = (SUCCESS, GROUPS)
SENT = 200
"""Status of a group whose complete answer has been sent."""
USUAL_STATUS = (str(SENT), "499", "500", "503")
"""Statuses exposed with 0 for every model from the start; others appear with their first group."""


class ShownChoice(Protocol):
    """An event of one choice in a step, as far as metrics read it."""

    @property
    def index(self) -> int: ...

    @property
    def finish(self) -> FinishReason | None: ...


class GroupRecord:
    """Times of one group, in seconds of one clock. A choice is recorded from its first text on."""

    def __init__(
        self, num_choices: int, *, clock: Callable[[], float], steps: "BucketCounts", on_first: Callable[[], None]
    ) -> None:
        """`steps` observes the time between two steps; `on_first` is called at the first step."""
        self.num_choices = num_choices
        self.started_s = clock()
        self.late_starts_s: dict[int, float] = {}
        """Start times of the choices that started later than the group."""
        self.first_seen_s: dict[int, float] = {}
        self.finished_s: dict[int, float] = {}
        self.finish_reasons: dict[int, FinishReason] = {}
        self._clock = clock
        self._steps = steps
        self._on_first = on_first
        self._last_step_s: float | None = None
        self._all_have_tokens = False
        """True once every choice has a token."""

    def start_choices(self, indices: Sequence[int]) -> None:
        self.late_starts_s |= dict.fromkeys(indices, self._clock())

    def step(self, choices: Sequence[ShownChoice], ended: bool) -> None:
        """Records one step. `ended` is True if a choice may have ended in it."""
        clock, last_s = self._clock, self._last_step_s  # a local is cheaper than `self._clock()`, at each step
        self._last_step_s = now_s = clock()
        if last_s is None:
            self._on_first()
        else:
            times = self._steps
            times.sum += (since_s := now_s - last_s)
            if not times.above < since_s <= times.up_to:
                times.find(since_s)
            times.counts[times.bucket] += 1
        if not self._all_have_tokens:
            for choice in choices:
                self.first_seen_s.setdefault(choice.index, now_s)
            self._all_have_tokens = len(self.first_seen_s) == self.num_choices
        if ended:
            for choice in choices:
                if choice.finish is not None:
                    self.finished_s[choice.index] = now_s
                    self.finish_reasons[choice.index] = choice.finish

    @property
    def age_s(self) -> float:
        """Time since the start."""
        return self._clock() - self.started_s

    @property
    def first_token_s(self) -> float | None:
        """Time from the start to the first token of the first choice."""
        return min(self.first_seen_s.values()) - self.started_s if self.first_seen_s else None

    @property
    def last_choice_first_token_s(self) -> float | None:
        """Time from the start to the first token of the last choice, once every choice has one."""
        return max(self.first_seen_s.values()) - self.started_s if len(self.first_seen_s) == self.num_choices else None

    def finish_spread_s(self, *, complete: bool) -> float | None:
        """Time from the end of the first choice to the end of the last, once every choice has ended. `complete`: True
        if the answer is complete, so that choices without an end have never started."""
        if not self.finished_s or (len(self.finished_s) < self.num_choices and not complete):
            return None
        return max(self.finished_s.values()) - min(self.finished_s.values())

    def decode_s(self, index: int) -> float:
        """Time from the first token of a choice that has ended to its end."""
        return self.finished_s[index] - self.first_seen_s[index]


class BucketCounts:
    """A histogram of one metric for one model, used on one event loop. Every step of every group adds a value, which is
    cheaper than with prometheus_client's histogram, which iterates over all buckets."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Number of values in each bucket, and above all bounds."""
        self.sum = 0.0
        self.bucket, self.above, self.up_to = 0, -inf, bounds[0]
        """Bucket of the last value with its bounds (above, up_to]; the next value is usually in it too."""

    def add(self, value: float) -> None:
        self.sum += value
        if not self.above < value <= self.up_to:
            self.find(value)
        self.counts[self.bucket] += 1

    def find(self, value: float) -> None:
        """Sets `bucket` and its bounds for a value."""
        self.bucket = place = bisect_left(self.bounds, value)
        bounds = (-inf, *self.bounds, inf)
        self.above, self.up_to = bounds[place], bounds[place + 1]


class GroupFamilies(Collector):
    """The metrics of the groups of all models, as a collector of the registry."""

    def __init__(self, registry: CollectorRegistry, *, aliases: bool) -> None:
        """With `aliases`, metrics that vLLM has are also collected under vLLM's names."""
        self._aliases = aliases
        self.counts: dict[Declared, Counter[tuple[str, ...]]] = {declared: Counter() for declared in COUNTED}
        """Counts by the values of the labels, the model first."""
        self._observed: dict[Declared, dict[str, BucketCounts]] = {declared: {} for declared in OBSERVED}
        registry.register(self)

    def histograms_of(self, model: str) -> dict[Declared, BucketCounts]:
        return {
            declared: by_model.setdefault(model, BucketCounts(declared.bounds))
            for declared, by_model in self._observed.items()
        }

    def collect(self) -> Iterator[Metric]:
        for declared, by_model in self._observed.items():
            for name, own in self._names(declared):
                metric = HistogramMetricFamily(name.family_name, name.meaning, labels=(MODEL, *own))
                for model, values in by_model.items():
                    metric.add_metric((model, *own.values()), buckets_of(declared.bounds, values.counts), values.sum)
                yield metric
        for declared, counts in self.counts.items():
            for name, own in self._names(declared):
                by_labels = {(model, *own.values(), *rest): count for (model, *rest), count in counts.items()}
                yield family_of(name, by_labels, labels=(MODEL, *own))

    def _names(self, declared: Declared) -> Iterator[tuple[Declared, Mapping[str, str]]]:
        """Yields a metric under each of its names, with the additional labels of all its samples under that name."""
        yield declared, {}
        if self._aliases:
            yield from ((alias, {ENGINE: ONE_ENGINE}) for alias in declared.aliases)


class GroupMetrics:
    """The metrics of one model's groups."""

    def __init__(self, families: GroupFamilies, model: str) -> None:
        self._model = model
        self._observed = families.histograms_of(model)
        self._counts = families.counts
        self._counts[SUCCESS].update({(model, reason.value): 0 for reason in FinishReason})
        self._counts[GROUPS].update({(model, status): 0 for status in USUAL_STATUS})

    def group_opened(
        self,
        num_choices: int,
        *,
        clock: Callable[[], float],
        prompt_tokens: int | None,
        max_tokens: int | None,
        on_first: Callable[[], None],
    ) -> GroupRecord:
        """Returns the record of a new group. Numbers of tokens are None if only another server knows them."""
        for declared, value in ((N, num_choices), (PROMPT_TOKENS, prompt_tokens), (MAX_TOKENS, max_tokens)):
            if value is not None:
                self._observed[declared].add(value)
        return GroupRecord(num_choices, clock=clock, steps=self._observed[BETWEEN_STEPS], on_first=on_first)

    def group_ended(self, record: GroupRecord, *, status: int, tokens: Mapping[int, int], queue_s: float = 0.0) -> None:
        """Observes the end of a group. `tokens` has the number of output tokens by choice, where it is known.
        `queue_s`: time for which the group waited for capacity."""
        self._counts[GROUPS][self._model, str(status)] += 1
        for declared, value in (
            (LATENCY, record.age_s),
            (FIRST_TOKEN, record.first_token_s),
            (LAST_FIRST_TOKEN, record.last_choice_first_token_s),
            (PREFILL_TIME, None if record.first_token_s is None else max(0.0, record.first_token_s - queue_s)),
            (FINISH_SPREAD, record.finish_spread_s(complete=status == SENT)),
        ):
            if value is not None:
                self._observed[declared].add(value)
        for reason in record.finish_reasons.values():
            self._counts[SUCCESS][self._model, reason.value] += 1
        for index, finished_s in record.finished_s.items():
            self._observed[DECODE_TIME].add(record.decode_s(index))
            start_s = record.late_starts_s.get(index, record.started_s + queue_s)
            self._observed[INFERENCE_TIME].add(max(0.0, finished_s - start_s))
        for index in record.finish_reasons.keys() & tokens.keys():
            self._observed[GENERATION_TOKENS].add(tokens[index])
            if tokens[index] > 1:
                self._observed[PER_TOKEN].add(record.decode_s(index) / (tokens[index] - 1))


def family(declared: Declared, labels: tuple[str, ...]) -> CounterMetricFamily | GaugeMetricFamily:
    """Returns a metric without values. `labels` are the names of the labels before the metric's own."""
    kind = CounterMetricFamily if declared.kind is MetricKind.COUNTER else GaugeMetricFamily
    return kind(declared.family_name, declared.meaning, labels=(*labels, *declared.labels))


def family_of(declared: Declared, counts: Mapping[tuple[str, ...], float], *, labels: tuple[str, ...]) -> Metric:
    metric = family(declared, labels)
    for values, number in counts.items():
        metric.add_metric(values, number)
    return metric


def buckets_of(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Returns each bound with the number of values up to it. `counts` has one item more than `bounds`, or none."""
    counts = counts or [0] * (len(bounds) + 1)
    return list(zip([*map(floatToGoString, bounds), INFINITY], accumulate(counts), strict=True))
