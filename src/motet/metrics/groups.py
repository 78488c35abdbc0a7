"""Metrics of groups and choices, by model: observed when a group is admitted, at its steps, and at its end.

`GroupRecord` notes what happens to one group; `GroupMetrics` observes it for a model.
"""

import collections
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from motet.metrics.declare import PREFIX, counter, histogram
from motet.types import FinishReason

MODEL = "model_name"
INFINITY = "+Inf"

LATENCY_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
STEP_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKENS = (1.0, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
CHOICES = (1.0, 2, 4, 8, 16, 32, 64, 128)

FIRST_TOKEN = histogram(
    "time_to_first_token_seconds", "seconds", "Time to the first token of a group's first choice.", bounds=LATENCY_S
)
LAST_FIRST_TOKEN = histogram(
    "time_to_first_token_last_choice_seconds",
    "seconds",
    "Time to the first token of a group's last choice.",
    bounds=LATENCY_S,
)
FINISH_SPREAD = histogram(
    "finish_spread_seconds", "seconds", "Time from a group's first finished choice to its last.", bounds=LATENCY_S
)
LATENCY = histogram(
    "e2e_request_latency_seconds", "seconds", "Time from a group's admission to its end.", bounds=LATENCY_S
)
BETWEEN_STEPS = histogram(
    "inter_token_latency_seconds", "seconds", "Time from one step of a group to its next.", bounds=STEP_S
)
PER_TOKEN = histogram(
    "request_time_per_output_token_seconds",
    "seconds",
    "Mean time a token after the first; once a finished choice.",
    bounds=STEP_S,
)
PROMPT_TOKENS = histogram("request_prompt_tokens", "tokens", "Tokens of a group's prompt.", bounds=TOKENS)
GENERATION_TOKENS = histogram("request_generation_tokens", "tokens", "Tokens of a finished choice.", bounds=TOKENS)
N = histogram("request_params_n", "choices", "Choices of a group.", bounds=CHOICES)
MAX_TOKENS = histogram("request_params_max_tokens", "tokens", "Tokens that a choice may have.", bounds=TOKENS)
SUCCESS = counter("request_success", "choices", "Choices that finished.", labels=("finished_reason",))
GROUPS = counter(
    "groups", "groups", "Groups that ended; 200, 499 (the client left) or the status of the error.", labels=("status",)
)

OBSERVED = (
    FIRST_TOKEN,
    LAST_FIRST_TOKEN,
    FINISH_SPREAD,
    LATENCY,
    PER_TOKEN,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    N,
    MAX_TOKENS,
)
COUNTED = (SUCCESS, GROUPS)


class Shown(Protocol):
    """The part of one choice that a step has shown."""

    @property
    def index(self) -> int: ...

    @property
    def finish(self) -> FinishReason | None: ...


class GroupRecord:
    """Times of one group, in seconds of one clock. A choice is known from its first text on."""

    def __init__(
        self, num_choices: int, *, clock: Callable[[], float], steps: "StepTimes", on_first: Callable[[], None]
    ) -> None:
        """`steps`: told the time between two steps; `on_first`: called at the first step."""
        self.num_choices = num_choices
        self.started_s = clock()
        self.first_seen_s: dict[int, float] = {}
        self.finished_s: dict[int, float] = {}
        self.finish_reasons: dict[int, FinishReason] = {}
        self._clock = clock
        self._steps = steps
        self._on_first = on_first
        self._last_step_s: float | None = None

    def step(self, choices: Sequence[Shown]) -> None:
        """Notes one step."""
        now_s, last_s = self._clock(), self._last_step_s
        self._last_step_s = now_s
        if last_s is None:
            self._on_first()
        else:
            times = self._steps
            times.sum_s += (since_s := now_s - last_s)
            times.counts[bisect_left(STEP_S, since_s)] += 1
        if len(self.first_seen_s) < self.num_choices:
            for choice in choices:
                self.first_seen_s.setdefault(choice.index, now_s)
        for choice in choices:
            if choice.finish is not None:
                self.finished_s[choice.index] = now_s
                self.finish_reasons[choice.index] = choice.finish

    @property
    def age_s(self) -> float:
        """Time from the start to now."""
        return self._clock() - self.started_s

    @property
    def first_token_s(self) -> float | None:
        """Time from the start to the first token of the first choice."""
        return min(self.first_seen_s.values()) - self.started_s if self.first_seen_s else None

    @property
    def last_choice_first_token_s(self) -> float | None:
        """Time from the start to the first token of the last choice, once every choice has one."""
        return max(self.first_seen_s.values()) - self.started_s if len(self.first_seen_s) == self.num_choices else None

    @property
    def finish_spread_s(self) -> float | None:
        """Time from the end of the first choice to the end of the last, once every choice has ended."""
        if len(self.finished_s) < self.num_choices:
            return None
        return max(self.finished_s.values()) - min(self.finished_s.values())

    def decode_s(self, index: int) -> float:
        """Time from the first token of a choice that has ended to its end."""
        return self.finished_s[index] - self.first_seen_s[index]


class StepTimes:
    """Times between steps of one model's groups, as a histogram. Adding to it is cheap, as every step of every group
    does so: prometheus_client's own takes a lock for every bucket. Written and read on one event loop."""

    def __init__(self) -> None:
        self.counts = [0] * (len(STEP_S) + 1)
        """One count for each bucket, and one more for times above all bounds."""
        self.sum_s = 0.0


class GroupFamilies(Collector):
    """The metrics of all models. The registry collects the times between steps from here."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.observed = {
            one: Histogram(PREFIX + one.name, one.meaning, [MODEL], buckets=one.bounds, registry=registry)
            for one in OBSERVED
        }
        self.counted = {
            one: Counter(PREFIX + one.name, one.meaning, [MODEL, *one.labels], registry=registry) for one in COUNTED
        }
        self._steps: dict[str, StepTimes] = {}
        registry.register(self)

    def steps_of(self, model: str) -> StepTimes:
        return self._steps.setdefault(model, StepTimes())

    def collect(self) -> Iterator[Metric]:
        metric = HistogramMetricFamily(PREFIX + BETWEEN_STEPS.name, BETWEEN_STEPS.meaning, labels=(MODEL,))
        for model, times in self._steps.items():
            metric.add_metric((model,), buckets_of(STEP_S, times.counts), times.sum_s)
        yield metric


class GroupMetrics:
    """The metrics of one model's groups."""

    def __init__(self, families: GroupFamilies, model: str) -> None:
        self._model = model
        self.steps = families.steps_of(model)
        self._observed = {one: family.labels(model) for one, family in families.observed.items()}
        self._counted = families.counted

    def group_opened(
        self,
        num_choices: int,
        *,
        clock: Callable[[], float],
        prompt_tokens: int | None,
        max_tokens: int | None,
        on_first: Callable[[], None],
    ) -> GroupRecord:
        """Returns the group's record. The numbers of tokens are None if only another server knows them."""
        self._observed[N].observe(num_choices)
        for declared, value in ((PROMPT_TOKENS, prompt_tokens), (MAX_TOKENS, max_tokens)):
            if value is not None:
                self._observed[declared].observe(value)
        return GroupRecord(num_choices, clock=clock, steps=self.steps, on_first=on_first)

    def group_ended(self, record: GroupRecord, *, status: int, tokens: Mapping[int, int]) -> None:
        """`tokens`: the number that each choice has written; unknown for a choice that is not in it."""
        self._counted[GROUPS].labels(self._model, str(status)).inc()
        self._observed[LATENCY].observe(record.age_s)
        for declared, value in (
            (FIRST_TOKEN, record.first_token_s),
            (LAST_FIRST_TOKEN, record.last_choice_first_token_s),
            (FINISH_SPREAD, record.finish_spread_s),
        ):
            if value is not None:
                self._observed[declared].observe(value)
        for reason, number in collections.Counter(record.finish_reasons.values()).items():
            self._counted[SUCCESS].labels(self._model, reason.value).inc(number)
        for index in record.finish_reasons.keys() & tokens.keys():
            self._observed[GENERATION_TOKENS].observe(tokens[index])
            if tokens[index] > 1:
                self._observed[PER_TOKEN].observe(record.decode_s(index) / (tokens[index] - 1))


def buckets_of(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Returns each bound with the number of values up to it. `counts`: one more than `bounds`, or empty."""
    counts = counts or [0] * (len(bounds) + 1)
    return list(zip([*map(str, bounds), INFINITY], accumulate(counts), strict=True))
