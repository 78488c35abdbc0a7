"""The exposition documents every metric, and has the figures of each engine and of all groups."""

import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from motet.deploy.child import block_size_in, figures_in
from motet.engine_info import AdapterInfo
from motet.ids import ModelName
from motet.metrics import prometheus
from motet.metrics.batch_figures import BatchFigures
from motet.metrics.declare import PREFIX, MetricKind, MetricPrefix, declared_in
from motet.metrics.group_metrics import COUNTED, OBSERVED, STEP_S
from motet.metrics.prometheus import Metrics, Scrape
from motet.metrics.routing import QUEUE_S, UPDATE_S, RoutingFigures
from motet.metrics.stats import EngineStats
from motet.testing.fake_engine import fake_info
from motet.transfer.figures import BUCKET_BOUNDS_S
from motet.transfer.orders import FailureKind
from motet.types import FinishReason, Role
from tests.metrics.shown import ShownChoice, TimedGroup, engine_sample

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"
OF_ENGINES, OF_ROUTING, OF_BATCHES = (
    [metric for _, metric in declared_in(one)] for one in (EngineStats, RoutingFigures, BatchFigures)
)
OF_GROUPS = [*OBSERVED, *COUNTED]
OTHERS = [prometheus.CACHE_FACTS, prometheus.WEIGHT_VERSION, prometheus.ADAPTERS]
OTHERS += [prometheus.WORKER_STATE, prometheus.WITHOUT_FIRST_TOKEN, prometheus.HTTP_REQUESTS, prometheus.LOOP_TASKS]
FACTS = ("motet:cache_config_info", "motet:weight_version_info")
"""Metrics of workers that need no answer of a worker."""
DECLARED = [*OF_ENGINES, *OF_ROUTING, *OF_BATCHES, *OF_GROUPS, *OTHERS]


def scrape_of(stats: EngineStats) -> Scrape:
    return Scrape(engines=[engine_sample(stats=stats)])


def a_cell(*, prefill: EngineStats | None, decode: EngineStats | None) -> Scrape:
    return Scrape(
        engines=[
            engine_sample("prefill-0", prefill, role=Role.PREFILL),
            engine_sample("decode-0", decode, role=Role.DECODE),
        ]
    )


def exposed(metrics: Metrics, scrape: Scrape | None = None) -> dict[str, float]:
    """Returns values by sample name and labels, without the labels of the model and of the only engine."""
    samples: dict[str, float] = {}
    default_labels = {"model_name": "m", "worker": "engine-0", "role": "both"}
    for family in text_string_to_metric_families(text_of(metrics, scrape)):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if default_labels.get(k) != v}
            key = sample.name + "".join(f"|{k}={v}" for k, v in sorted(labels.items()))
            samples[key] = sample.value
    return samples


def text_of(metrics: Metrics, scrape: Scrape | None = None, *, models: Sequence[str] = ("m",)) -> str:
    return metrics.exposition(scrape or Scrape(), models=models, waiting=3, tasks=7).body.decode()


def test_the_page_has_the_row_of_every_declared_metric() -> None:
    """If this fails, the message has the rows that docs/metrics.md lacks, and the rows to remove."""
    rows = [line for line in DOC.read_text().splitlines() if line.startswith(f"| `{PREFIX}")]
    declared = [one.row for one in DECLARED]
    missing, left_over = "\n".join(set(declared) - set(rows)), "\n".join(set(rows) - set(declared))
    assert not missing and not left_over
    assert len(rows) == len(declared) == len({one.name for one in DECLARED})


def test_exactly_the_declared_metrics_are_exposed() -> None:
    families = [(family.name, family.type, family.documentation) for family in Metrics().registry.collect()]
    assert sorted(families) == sorted(
        (PREFIX + declared.name, declared.kind, declared.meaning) for declared in DECLARED
    )


def test_every_meaning_is_a_sentence_and_every_label_is_in_the_row() -> None:
    for declared in DECLARED:
        assert re.fullmatch(r"[A-Z0-9].*\.", declared.meaning)
        assert all(f"`{label}`" in declared.row for label in declared.labels)


@pytest.mark.parametrize("struct", [EngineStats, RoutingFigures])
def test_a_declaration_names_only_existing_fields(struct: type) -> None:
    names = set(get_type_hints(struct))
    for _, declared in declared_in(struct):
        assert {declared.share_of, declared.sum_in} <= {"", *names}
        assert bool(declared.bounds) is bool(declared.sum_in) is (declared.kind is MetricKind.HISTOGRAM)


def test_the_page_lists_every_way_in_which_a_pull_fails() -> None:
    head, *documented = re.findall(r"^\| `([a-z-]+)` \| [^|]+ \|$", DOC.read_text(), re.MULTILINE)
    assert (head, documented) == ("kind", [kind.value for kind in FailureKind])


def test_every_field_of_the_engine_is_exposed_under_its_name() -> None:
    apart = {"transfer_seconds", "transfer_seconds_sum", "transfer_failures", "step_tokens", "step_tokens_sum"}
    names = [field.name for field in fields(EngineStats) if field.name not in apart]
    values = {name: 2**place for place, name in enumerate(names)}  # each field has a value of its own
    samples = exposed(Metrics(), scrape_of(EngineStats(**values)))
    shown = {
        name: samples[declared.exposed_name]
        for name, declared in declared_in(EngineStats)
        if name in values and not declared.share_of
    }
    assert shown == values
    assert samples["motet:kv_cache_usage_perc"] == values["blocks_used"] / values["blocks_total"]


def test_a_worker_without_blocks_uses_none_of_them() -> None:
    assert exposed(Metrics(), scrape_of(EngineStats()))["motet:kv_cache_usage_perc"] == 0.0


def test_pull_seconds_are_a_histogram() -> None:
    counts = (2, 0, 1, *(0 for _ in BUCKET_BOUNDS_S[3:]), 4)  # four took longer than the last bound
    stats = EngineStats(transfer_seconds=counts, transfer_seconds_sum=55.5)
    samples = exposed(Metrics(), scrape_of(stats))
    name = "motet:kv_transfer_seconds"
    assert [samples[f"{name}_bucket|le={bound}"] for bound in BUCKET_BOUNDS_S] == [
        2,
        2,
        *(3 for _ in BUCKET_BOUNDS_S[2:]),
    ]
    assert samples[f"{name}_bucket|le=+Inf"] == samples[f"{name}_count"] == 7
    assert samples[f"{name}_sum"] == 55.5


def test_an_engine_that_never_pulled_has_an_empty_histogram() -> None:
    samples = exposed(Metrics(), scrape_of(EngineStats()))
    name = "motet:kv_transfer_seconds"
    assert samples[f"{name}_bucket|le=+Inf"] == samples[f"{name}_count"] == 0


def test_failures_are_counted_by_kind() -> None:
    samples = exposed(Metrics(), scrape_of(EngineStats(transfer_failures={"stale": 2, "timeout": 1})))
    assert samples["motet:kv_transfer_failures_total|kind=stale"] == 2
    assert samples["motet:kv_transfer_failures_total|kind=timeout"] == 1


def test_everything_that_routing_counts_is_exposed() -> None:
    figures = RoutingFigures(
        bypasses={"short": 1},
        migrations={("died", "resumed"): 2, ("silent", "limit"): 3},
        choices_resumed=4,
        tokens_replayed=5,
        decisions={"prefix": 6, "load": 7},
        overlap_tokens=8,
        routed_tokens=9,
        spreads=10,
        choices={"decode-0": 11},
        queued=12,
        queued_choices=17,
        client_choices={"key-0": 18},
        client_blocks={"key-0": 19},
        client_queued_choices={"key-1": 20},
        queue_seconds=(1, 0, 2, *(0 for _ in QUEUE_S[3:]), 3),
        queue_seconds_sum=99.5,
        restarts={"decode-0": 13},
        pull_fallbacks={"late": 14},
        tickets_unused={"left": 15},
        weight_updates={"applied": 16},
        weight_update_seconds=(0, 1, *(0 for _ in UPDATE_S[2:]), 2),
        weight_update_seconds_sum=300.5,
    )
    samples = exposed(Metrics(), Scrape(routing=figures))
    assert {name: value for name, value in samples.items() if name in EXPECTED} == EXPECTED
    undeclared = {field.name for field in fields(RoutingFigures)} - {name for name, _ in declared_in(RoutingFigures)}
    assert undeclared == {
        "queue_seconds_sum",
        "weight_update_seconds_sum",
        "adapters_running",
        "adapters_waiting",
    }
    assert samples["motet:weight_update_seconds_bucket|le=120.0"] == 1
    assert (samples["motet:weight_update_seconds_sum"], samples["motet:weight_update_seconds_count"]) == (300.5, 3)
    bounds = [samples[f"motet:queue_seconds_bucket|le={bound}"] for bound in (*QUEUE_S, "+Inf")]
    assert bounds == [1, 1, *(3 for _ in QUEUE_S[2:]), 6]
    assert (samples["motet:queue_seconds_sum"], samples["motet:queue_seconds_count"]) == (99.5, 6)


EXPECTED = {
    "motet:bypasses_total|reason=short": 1,
    "motet:migrations_total|cause=died|outcome=resumed": 2,
    "motet:migrations_total|cause=silent|outcome=limit": 3,
    "motet:choices_resumed_total": 4,
    "motet:resumed_tokens_total": 5,
    "motet:routing_decisions_total|reason=prefix": 6,
    "motet:routing_decisions_total|reason=load": 7,
    "motet:routing_overlap_tokens_total": 8,
    "motet:routing_prompt_tokens_total": 9,
    "motet:group_spreads_total": 10,
    "motet:worker_choices|worker=decode-0": 11,
    "motet:groups_queued": 12,
    "motet:choices_queued": 17,
    "motet:client_choices|client=key-0": 18,
    "motet:client_kv_blocks|client=key-0": 19,
    "motet:client_choices_queued|client=key-1": 20,
    "motet:engine_restarts_total|worker=decode-0": 13,
    "motet:pull_fallbacks_total|reason=late": 14,
    "motet:tickets_unused_total|end=left": 15,
    "motet:weight_updates_total|outcome=applied": 16,
}


def test_a_router_that_never_queued_has_an_empty_histogram() -> None:
    samples = exposed(Metrics())
    assert samples["motet:queue_seconds_bucket|le=+Inf"] == samples["motet:queue_seconds_count"] == 0
    assert samples["motet:groups_queued"] == samples["motet:choices_resumed_total"] == 0


def test_a_worker_is_in_one_of_its_states() -> None:
    scrape = Scrape(states={("decode-0", "ready"): False, ("decode-0", "silent"): True})
    samples = exposed(Metrics(), scrape)
    assert samples["motet:worker_state|state=ready|worker=decode-0"] == 0
    assert samples["motet:worker_state|state=silent|worker=decode-0"] == 1


def test_each_worker_of_a_cell_has_its_own_figures() -> None:
    samples = exposed(Metrics(), a_cell(prefill=EngineStats(prefills=3), decode=EngineStats(transfers=2)))
    assert samples["motet:prefills_total|role=prefill|worker=prefill-0"] == 3
    assert samples["motet:prefills_total|role=decode|worker=decode-0"] == 0
    assert samples["motet:kv_transfers_total|role=decode|worker=decode-0"] == 2
    facts = "|block_size=16|bytes_per_block=16|num_blocks=1024"
    assert samples[f"motet:cache_config_info|{facts[1:]}|role=prefill|worker=prefill-0"] == 1


def test_a_worker_shows_the_version_that_it_has_and_no_older_one() -> None:
    metrics = Metrics()
    for version in ("0", "step 1", "step 2"):
        info = msgspec.structs.replace(fake_info(), weight_version=version)
        samples = exposed(metrics, Scrape(engines=[engine_sample(stats=EngineStats(), info=info)]))
        shown = [name for name in samples if name.startswith("motet:weight_version_info")]
        assert shown == [f"motet:weight_version_info|version={version}"] and samples[shown[0]] == 1


def test_a_worker_shows_its_adapters_and_not_those_that_it_had() -> None:
    """A trainer can give each adapter a new name: a series of an earlier adapter would stay forever."""
    metrics = Metrics(MetricPrefix.VLLM)
    for name in ("a", "b"):
        adapter = AdapterInfo(name=ModelName(name), digest="d", version="7", rank=8)
        info = msgspec.structs.replace(fake_info(max_adapters=3), adapters=(adapter,))
        routing = RoutingFigures(adapters_running=(name,))
        samples = exposed(metrics, Scrape(engines=[engine_sample(stats=EngineStats(), info=info)], routing=routing))
        assert [key for key in samples if "adapter_info" in key] == [f"motet:adapter_info|adapter={name}|version=7"]
        (shown,) = (key for key in samples if "lora_requests_info" in key)
        assert f"max_lora=3|running_lora_adapters={name}|waiting_lora_adapters=" in shown


def test_programs_read_counters_as_sums_over_the_workers() -> None:
    cell = a_cell(prefill=EngineStats(prefill_tokens=40), decode=EngineStats(prefill_tokens=2))
    text = text_of(Metrics(), cell)
    assert figures_in(text).prefill_tokens == 42
    assert block_size_in(text).tokens == 16


def test_a_worker_without_an_answer_has_no_samples() -> None:
    samples = exposed(Metrics(), a_cell(prefill=None, decode=EngineStats()))
    assert "motet:forks_total|role=decode|worker=decode-0" in samples
    assert not any("prefill-0" in name for name in samples if not name.startswith(FACTS))


def test_without_an_engine_its_figures_are_absent() -> None:
    samples = exposed(Metrics())
    assert not any(name.startswith("motet:forks") for name in samples)
    assert samples["motet:groups_without_first_token"] == 3
    assert samples["motet:event_loop_tasks"] == 7


def test_a_group_leaves_its_times_and_counts() -> None:
    metrics = Metrics()
    group = TimedGroup(metrics.of("m"), 2, started_s=100.0)
    group.step([ShownChoice(0, None)], 101.0)
    group.step([ShownChoice(0, None), ShownChoice(1, None)], 102.0)
    group.step([ShownChoice(0, FinishReason.STOP)], 103.0)
    group.step([ShownChoice(1, FinishReason.LENGTH)], 106.0)
    group.end(107.0, tokens={0: 3, 1: 5})
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


def test_times_between_steps_are_a_histogram() -> None:
    metrics = Metrics()
    group = TimedGroup(metrics.of("m"), 1)
    for now_s in (0.0, 0.0025, 0.0055, 700.0055):
        group.step([], now_s)
    samples = exposed(metrics)
    name = "motet:inter_token_latency_seconds"
    assert [samples[f"{name}_bucket|le={bound}"] for bound in STEP_S] == [1, *(2 for _ in STEP_S[1:])]
    assert samples[f"{name}_bucket|le=+Inf"] == samples[f"{name}_count"] == 3
    assert samples[f"{name}_sum"] == 700.0055


def test_a_group_that_ended_early_leaves_only_the_times_that_it_has() -> None:
    metrics = Metrics()
    TimedGroup(metrics.of("m"), 2).end(1.0, status=499)
    samples = exposed(metrics)
    assert samples["motet:time_to_first_token_seconds_count"] == 0
    assert samples["motet:finish_spread_seconds_count"] == 0
    assert samples["motet:groups_total|status=499"] == 1


def test_the_spread_of_a_complete_answer_leaves_out_choices_that_never_started() -> None:
    for status, count in ((200, 1), (499, 0)):
        metrics = Metrics()
        group = TimedGroup(metrics.of("m"), 8)
        group.step([ShownChoice(0, FinishReason.STOP), ShownChoice(1, None)], 1.0)
        group.step([ShownChoice(1, FinishReason.STOP)], 3.0)
        group.end(4.0, status=status)
        samples = exposed(metrics)
        assert samples["motet:finish_spread_seconds_count"] == count
        assert samples["motet:finish_spread_seconds_sum"] == 2.0 * count


def test_two_apps_in_one_process_share_nothing() -> None:
    first, second = Metrics(), Metrics()
    first.http_request(handler="/health", method="GET", status=200)
    assert "motet:http_requests_total|handler=/health|method=GET|status=200" in exposed(first)
    assert "motet:http_requests_total|handler=/health|method=GET|status=200" not in exposed(second)


def test_groups_have_their_model_s_label_and_the_server_that_of_its_only_model() -> None:
    metrics = Metrics()
    for model, status in (("m", 200), ("other", 200), ("other", 499)):
        group = TimedGroup(metrics.of(model), 1)
        for now_s in (0.5, 1.0):
            group.step([], now_s)
        group.end(1.0, status=status)
    text = text_of(metrics, scrape_of(EngineStats()), models=("m", "other"))
    assert 'motet:groups_total{model_name="m",status="200"} 1.0' in text
    assert 'motet:groups_total{model_name="other",status="499"} 1.0' in text
    assert 'motet:inter_token_latency_seconds_count{model_name="other"} 2.0' in text
    for shared in ("groups_without_first_token", "groups_queued"):
        assert re.findall(rf"^motet:{shared}\{{(.*)\}} ", text, re.MULTILINE) == ['model_name=""']
    assert 'motet:forks_total{model_name="",role="both",worker="engine-0"}' in text


def test_metrics_of_the_server_keep_their_label_when_only_one_model_is_left() -> None:
    metrics = Metrics()
    texts = [text_of(metrics, models=models) for models in (["m"], ["m", "other"], ["m"])]
    name = "motet:groups_without_first_token"
    found = [re.findall(rf'^{name}\{{model_name="(.*)"\}} ', text, re.MULTILINE) for text in texts]
    assert found == [["m"], [""], [""]]
