"""What routing counts, by name, kind and meaning, and how it is exposed: read when the metrics are scraped."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from motet.metrics.cumulative import cumulative
from motet.metrics.names import PREFIX, Kind
from motet.metrics.routing import QUEUE_S, RoutingFigures

MODEL = "model_name"


@dataclass(frozen=True)
class RoutingFigure:
    """`labels`: beside the model's; `read` gives a value for each combination of them that has occurred."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    read: Callable[[RoutingFigures], Mapping[tuple[str, ...], float]]


def _alone(read: Callable[[RoutingFigures], float]) -> Callable[[RoutingFigures], Mapping[tuple[str, ...], float]]:
    """A figure without labels."""
    return lambda figures: {(): read(figures)}


def _by(
    read: Callable[[RoutingFigures], Mapping[str, int]],
) -> Callable[[RoutingFigures], dict[tuple[str, ...], float]]:
    """A figure with one label."""
    return lambda figures: {(value,): count for value, count in read(figures).items()}


def _migrations(figures: RoutingFigures) -> dict[tuple[str, ...], float]:
    return {labels: count for labels, count in figures.migrations.items()}  # noqa: C416  dict() would not widen the types


_C, _G = Kind.COUNTER, Kind.GAUGE

ROUTING_FIGURES = (
    RoutingFigure("bypasses", _C, "Groups that did without prefill workers.", ("reason",), _by(lambda f: f.bypasses)),
    RoutingFigure("migrations", _C, "Groups that lost their worker.", ("cause", "outcome"), _migrations),
    RoutingFigure("choices_resumed", _C, "Choices that went on elsewhere.", (), _alone(lambda f: f.choices_resumed)),
    RoutingFigure(
        "resumed_tokens", _C, "Tokens they had written, computed again.", (), _alone(lambda f: f.tokens_replayed)
    ),
    RoutingFigure("routing_decisions", _C, "Choices of a worker.", ("reason",), _by(lambda f: f.decisions)),
    RoutingFigure(
        "routing_prompt_tokens", _C, "Prompt tokens of routed groups.", (), _alone(lambda f: f.routed_tokens)
    ),
    RoutingFigure(
        "routing_overlap_tokens", _C, "Those that the chosen workers had.", (), _alone(lambda f: f.overlap_tokens)
    ),
    RoutingFigure(
        "pull_fallbacks",
        _C,
        "Groups whose KV did not come and was computed on decode.",
        ("reason",),
        _by(lambda f: f.pull_fallbacks),
    ),
    RoutingFigure(
        "tickets_unused", _C, "Prefilled prompts that nobody fetched.", ("end",), _by(lambda f: f.tickets_unused)
    ),
    RoutingFigure("group_spreads", _C, "Groups split over several workers.", (), _alone(lambda f: f.spreads)),
    RoutingFigure("worker_choices", _G, "Open choices given to a worker.", ("worker",), _by(lambda f: f.choices)),
    RoutingFigure("engine_restarts", _C, "Engine processes started again.", ("worker",), _by(lambda f: f.restarts)),
    RoutingFigure("groups_queued", _G, "Groups waiting for room on a worker.", (), _alone(lambda f: f.queued)),
)


def routing_metrics(model: str, figures: RoutingFigures) -> Iterator[Metric]:
    for figure in ROUTING_FIGURES:
        family = CounterMetricFamily if figure.kind is Kind.COUNTER else GaugeMetricFamily
        metric: CounterMetricFamily | GaugeMetricFamily = family(
            PREFIX + figure.name, figure.help, labels=(MODEL, *figure.labels)
        )
        for values, number in figure.read(figures).items():
            metric.add_metric((model, *values), number)
        yield metric
    queued = HistogramMetricFamily(PREFIX + "queue_seconds", "From a group's arrival to its worker.", labels=(MODEL,))
    queued.add_metric((model,), cumulative(QUEUE_S, figures.queue_seconds), figures.queue_seconds_sum)
    yield queued


def worker_states(model: str, states: Mapping[tuple[str, str], bool]) -> Metric:
    """`states`: every worker with every state, and whether it is in it."""
    metric = GaugeMetricFamily(
        PREFIX + "worker_state", "1 for the state of the worker, 0 for others.", labels=(MODEL, "worker", "state")
    )
    for (worker, state), is_so in states.items():
        metric.add_metric((model, worker, state), int(is_so))
    return metric
