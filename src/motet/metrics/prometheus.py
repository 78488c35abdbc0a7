"""The metrics of one server, in a registry of their own, as Prometheus reads them.

engine figures      read from `Engine.stats()` of each worker at each scrape (`metrics.scraped`)
routing figures     read from whoever routes, at each scrape (`metrics.routing_exposed`)
group figures       observed here when a step of a group comes in and when the group ends
HTTP figures        counted when a response has been sent
"""

import collections
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from motet.metrics.names import PREFIX
from motet.metrics.record import GroupRecord
from motet.metrics.scraped import Scrape, ScrapeCollector
from motet.metrics.step_times import StepTimes

LATENCY_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
STEP_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
CHOICES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """All metrics of one app."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._scraped = ScrapeCollector(model)
        self.registry.register(self._scraped)
        self._first_token = self._histogram("time_to_first_token_seconds", "First token of the first choice.")
        self._last_first_token = self._histogram(
            "time_to_first_token_last_choice_seconds", "First token of the last choice."
        )
        self._spread = self._histogram("finish_spread_seconds", "From the first finished choice to the last.")
        self._latency = self._histogram("e2e_request_latency_seconds", "From the request to the end of its group.")
        self.steps = StepTimes(
            PREFIX + "inter_token_latency_seconds", "From one step of a group to the next.", bounds=STEP_S, model=model
        )
        self.registry.register(self.steps)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time a token after the first, once a choice.", STEP_S
        )
        self._prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a group.", TOKENS)
        self._generation_tokens = self._histogram("request_generation_tokens", "Tokens of a choice.", TOKENS)
        self._n = self._histogram("request_params_n", "Choices of a group.", CHOICES)
        self._max_tokens = self._histogram("request_params_max_tokens", "Tokens a choice may have.", TOKENS)
        self._success = Counter(
            PREFIX + "request_success",
            "Choices that finished.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._groups = Counter(
            PREFIX + "groups", "Groups that ended, by HTTP status.", ["model_name", "status"], registry=self.registry
        )
        self._waiting = Gauge(
            PREFIX + "groups_without_first_token",
            "Admitted groups without a first token: what overload is judged by.",
            ["model_name"],
            registry=self.registry,
        ).labels(model)
        self._http = Counter(
            PREFIX + "http_requests", "Responses sent.", ["handler", "method", "status"], registry=self.registry
        )

    def group_opened(self, record: GroupRecord, *, prompt_tokens: int, max_tokens: int) -> None:
        self._n.observe(record.num_choices)
        self._prompt_tokens.observe(prompt_tokens)
        self._max_tokens.observe(max_tokens)

    def group_ended(self, record: GroupRecord, *, status: int, tokens: Mapping[int, int], now_s: float) -> None:
        """`tokens`: how many each choice has written."""
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
            count, decode_s = tokens.get(index, 0), record.decode_s(index)
            self._generation_tokens.observe(count)
            if decode_s is not None and count > 1:
                self._per_token.observe(decode_s / (count - 1))

    def http_request(self, *, handler: str, method: str, status: int) -> None:
        self._http.labels(handler, method, str(status)).inc()

    def exposition(self, scrape: Scrape, *, waiting: int) -> bytes:
        """The text of `/metrics`."""
        self._scraped.scrape = scrape
        self._waiting.set(waiting)
        return generate_latest(self.registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...] = LATENCY_S) -> Histogram:
        histogram = Histogram(PREFIX + name, help, ["model_name"], buckets=buckets, registry=self.registry)
        return histogram.labels(self._model)
