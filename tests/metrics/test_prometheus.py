"""The exposition: every metric documented, engine figures as the engine gave them, group figures as they happened."""

import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from motet.engines.fake import fake_info
from motet.metrics.names import ENGINE_FIGURES, PREFIX
from motet.metrics.prometheus import Metrics
from motet.metrics.record import GroupRecord
from motet.types import EngineStats, FinishReason

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `([^`]+)` \| (\w+) \| ([^|]+) \| (.+) \|$", re.MULTILINE)


def exposed(metrics: Metrics, stats: EngineStats | None = None) -> dict[str, float]:
    """Sample name with its labels, without the model's, to its value."""
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.exposition(stats, waiting=3).decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            key = sample.name + "".join(f"|{k}={v}" for k, v in sorted(labels.items()))
            samples[key] = sample.value
    return samples


def registered(metrics: Metrics) -> Iterator[tuple[str, str]]:
    for family in metrics.registry.collect():
        yield family.name + ("_total" if family.type == "counter" else ""), family.type


def test_the_page_lists_exactly_the_metrics_there_are() -> None:
    documented = [(name, kind) for name, kind, _, _ in ROW.findall(DOC.read_text())]
    assert sorted(documented) == sorted(registered(Metrics("m", fake_info())))


def test_every_figure_of_the_engine_is_exposed_under_its_name() -> None:
    names = EngineStats.__struct_fields__
    stats = EngineStats(**{name: 2**place for place, name in enumerate(names)})  # each value stands for its field
    samples = exposed(Metrics("m", fake_info()), stats)
    shown = set()
    for figure in ENGINE_FIGURES:
        name = PREFIX + figure.name + ("_total" if figure.kind == "counter" else "")
        assert samples[name] == figure.read(stats)
        shown.add(samples[name])
    assert {float(2**place) for place in range(len(names))} <= shown


def test_without_an_engine_its_figures_are_absent() -> None:
    samples = exposed(Metrics("m", fake_info()))
    assert not any(name.startswith("motet:forks") for name in samples)
    assert samples["motet:groups_without_first_token"] == 3


def test_a_group_leaves_its_times_and_counts() -> None:
    metrics = Metrics("m", fake_info())
    record = GroupRecord(num_choices=2, started_s=100.0)
    metrics.group_opened(record, prompt_tokens=7, max_tokens=9)
    record.step([(0, None)], 101.0)
    record.step([(0, None), (1, None)], 102.0)
    record.step([(0, FinishReason.STOP)], 103.0)
    record.step([(1, FinishReason.LENGTH)], 106.0)
    metrics.group_ended(record, status=200, tokens={0: 3, 1: 5}, now_s=107.0)
    samples = exposed(metrics)
    assert samples["motet:time_to_first_token_seconds_sum"] == 1.0
    assert samples["motet:time_to_first_token_last_choice_seconds_sum"] == 2.0
    assert samples["motet:finish_spread_seconds_sum"] == 3.0
    assert samples["motet:e2e_request_latency_seconds_sum"] == 7.0
    assert samples["motet:request_time_per_output_token_seconds_sum"] == 2.0 / 2 + 4.0 / 4
    assert samples["motet:request_prompt_tokens_sum"] == 7
    assert samples["motet:request_generation_tokens_sum"] == 8
    assert samples["motet:request_params_n_sum"] == 2
    assert samples["motet:request_params_max_tokens_sum"] == 9
    assert samples["motet:request_success_total|finished_reason=stop"] == 1
    assert samples["motet:request_success_total|finished_reason=length"] == 1
    assert samples["motet:groups_total|status=200"] == 1


def test_a_group_that_ended_early_leaves_no_times_it_does_not_have() -> None:
    metrics = Metrics("m", fake_info())
    metrics.group_ended(GroupRecord(num_choices=2, started_s=0.0), status=499, tokens={}, now_s=1.0)
    samples = exposed(metrics)
    assert samples["motet:time_to_first_token_seconds_count"] == 0
    assert samples["motet:finish_spread_seconds_count"] == 0
    assert samples["motet:groups_total|status=499"] == 1


def test_two_apps_in_one_process_share_nothing() -> None:
    first, second = Metrics("m", fake_info()), Metrics("m", fake_info())
    first.http_request(handler="/health", method="GET", status=200)
    assert "motet:http_requests_total|handler=/health|method=GET|status=200" in exposed(first)
    assert "motet:http_requests_total|handler=/health|method=GET|status=200" not in exposed(second)
