"""Figures of groups and choices, by model: observed when a group comes, at its steps, and when it has ended."""

import collections
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram

from motet.metrics.names import PREFIX
from motet.metrics.record import GroupRecord
from motet.metrics.step_times import StepTimesByModel

MODEL = "model_name"
LATENCY_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
STEP_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
CHOICES = (1, 2, 4, 8, 16, 32, 64, 128)


class GroupFamilies:
    """The metrics of all models, in the order of the exposition."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.first_token = self._histogram("time_to_first_token_seconds", "First token of the first choice.")
        self.last_first_token = self._histogram(
            "time_to_first_token_last_choice_seconds", "First token of the last choice."
        )
        self.spread = self._histogram("finish_spread_seconds", "From the first finished choice to the last.")
        self.latency = self._histogram("e2e_request_latency_seconds", "From the request to the end of its group.")
        self.steps = StepTimesByModel(
            PREFIX + "inter_token_latency_seconds", "From one step of a group to the next.", bounds=STEP_S
        )
        registry.register(self.steps)
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time a token after the first, once a choice.", STEP_S
        )
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a group.", TOKENS)
        self.generation_tokens = self._histogram("request_generation_tokens", "Tokens of a choice.", TOKENS)
        self.n = self._histogram("request_params_n", "Choices of a group.", CHOICES)
        self.max_tokens = self._histogram("request_params_max_tokens", "Tokens a choice may have.", TOKENS)
        self.success = self._counter("request_success", "Choices that finished.", "finished_reason")
        self.groups = self._counter("groups", "Groups that ended, by HTTP status.", "status")

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...] = LATENCY_S) -> Histogram:
        return Histogram(PREFIX + name, help, [MODEL], buckets=buckets, registry=self._registry)

    def _counter(self, name: str, help: str, label: str) -> Counter:
        return Counter(PREFIX + name, help, [MODEL, label], registry=self._registry)


class GroupMetrics:
    """Of the groups of one model."""

    def __init__(self, families: GroupFamilies, model: str) -> None:
        self._model = model
        self.steps = families.steps.of(model)
        self._first_token = families.first_token.labels(model)
        self._last_first_token = families.last_first_token.labels(model)
        self._spread = families.spread.labels(model)
        self._latency = families.latency.labels(model)
        self._per_token = families.per_token.labels(model)
        self._prompt_tokens = families.prompt_tokens.labels(model)
        self._generation_tokens = families.generation_tokens.labels(model)
        self._n = families.n.labels(model)
        self._max_tokens = families.max_tokens.labels(model)
        self._success = families.success
        self._groups = families.groups

    def group_opened(self, record: GroupRecord, *, prompt_tokens: int | None, max_tokens: int | None) -> None:
        """None: only another server knows."""
        self._n.observe(record.num_choices)
        if prompt_tokens is not None:
            self._prompt_tokens.observe(prompt_tokens)
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)

    def group_ended(self, record: GroupRecord, *, status: int, tokens: Mapping[int, int], now_s: float) -> None:
        """`tokens`: how many each choice has written; a choice that is not there is not known."""
        self._groups.labels(self._model, str(status)).inc()
        self._latency.observe(now_s - record.started_s)
        for histogram, value in (
            (self._first_token, record.first_token_s),
            (self._last_first_token, record.last_choice_first_token_s),
            (self._spread, record.finish_spread_s),
        ):
            if value is not None:
                histogram.observe(value)
        for reason, number in collections.Counter(record.finish_reasons.values()).items():
            self._success.labels(self._model, reason.value).inc(number)
        for index in record.finish_reasons:
            if (count := tokens.get(index)) is None:
                continue
            decode_s = record.decode_s(index)
            self._generation_tokens.observe(count)
            if decode_s is not None and count > 1:
                self._per_token.observe(decode_s / (count - 1))
