"""With `--metric-prefix vllm` a server also has vLLM's metrics, with vLLM's names and labels."""

import re
from dataclasses import replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from motet.engines.vllm.report import scrape_of
from motet.metrics.declare import PREFIX, VLLM_PREFIX, MetricKind, MetricPrefix, aliases_in
from motet.metrics.group_metrics import COUNTED, OBSERVED
from motet.metrics.prometheus import ADAPTERS_IN_VLLM, CACHE_FACTS_IN_VLLM, TRANSFER_SIZES, Metrics, Scrape
from motet.metrics.routing import QUEUE_S, RoutingFigures
from motet.metrics.stats import STEP_TOKENS, EngineStats
from motet.types import FinishReason, Role
from tests.metrics.shown import ShownChoice, TimedGroup, engine_sample

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"
ALIASES = [
    *(alias for _, alias in aliases_in(EngineStats)),
    *(alias for _, alias in aliases_in(RoutingFigures)),
    *TRANSFER_SIZES,
    *(alias for declared in (*OBSERVED, *COUNTED) for alias in declared.aliases),
    CACHE_FACTS_IN_VLLM,
    ADAPTERS_IN_VLLM,
]
LABELS = {"model_name", "engine"}
IN_VLLM = {
    "lora_requests_info": "gauge",
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "gpu_cache_usage_perc": "gauge",  # the name in older versions, which older endpoint pickers read
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "num_preemptions": "counter",
    "spec_decode_num_draft_tokens": "counter",
    "spec_decode_num_accepted_tokens": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_params_n": "histogram",
    "request_params_max_tokens": "histogram",
    "request_success": "counter",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "iteration_tokens_total": "histogram",
    "nixl_xfer_time_seconds": "histogram",
    "nixl_bytes_transferred": "histogram",
    "nixl_num_descriptors": "histogram",
    "nixl_num_failed_transfers": "counter",
    "nixl_num_kv_expired_reqs": "counter",
    "cache_config_info": "gauge",
}
"""Names and kinds, as the code of vLLM 0.32 declares them."""
SLOW_S = (0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
BOUNDS: dict[str, set[float]] = {
    "time_to_first_token_seconds": {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, *SLOW_S, 160, 640, 2560},
    "inter_token_latency_seconds": {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, *SLOW_S},
    "e2e_request_latency_seconds": {0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960}
    | {1920, 7680},
    "iteration_tokens_total": {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384},
    "request_prompt_tokens": {mantissa * 10**power for mantissa in (1, 2, 5) for power in range(6)},
}
"""The bounds of vLLM's buckets. In vLLM the bounds for tokens end with the longest prompt of the model."""


def a_cell() -> Scrape:
    stats = EngineStats(choices_running=3, blocks_total=100, blocks_used=60, generated_tokens=5, prompt_tokens=10)
    return Scrape(
        engines=[
            engine_sample("prefill-0", replace(stats, blocks_used=20, choices_running=1), role=Role.PREFILL),
            engine_sample("decode-0", replace(stats, choices_waiting=2), role=Role.DECODE),
            engine_sample("decode-1", role=Role.DECODE),
        ],
        routing=RoutingFigures(queued=2, queued_choices=16),
    )


def text_of(scrape: Scrape, metrics: Metrics | None = None) -> str:
    metrics = metrics or Metrics(MetricPrefix.VLLM)
    return metrics.exposition(scrape, models=["m"], waiting=3, tasks=7).body.decode()


def samples(text: str) -> dict[str, float]:
    """Returns values by name and labels, without the labels of the model and the engine."""
    return {
        sample.name
        + "".join(f"|{key}={sample.labels[key]}" for key in sorted(sample.labels.keys() - LABELS)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(VLLM_PREFIX)
    }


def test_every_alias_is_a_metric_of_vllm_of_the_same_kind() -> None:
    assert {alias.name: str(alias.kind) for alias in ALIASES} == IN_VLLM


def test_quantiles_are_as_fine_as_vllm_s() -> None:
    motet_bounds = {alias.name: set(alias.bounds) for alias in ALIASES}
    assert not {name: bounds - motet_bounds[name] for name, bounds in BOUNDS.items() if bounds - motet_bounds[name]}
    ends = re.findall(r'^vllm:request_prompt_tokens_bucket.*le="([^"]*)"', text_of(Scrape()), re.MULTILINE)
    assert ends[:3] == [
        "1.0",
        "2.0",
        "5.0",
    ]  # in vLLM's notation: sums by `le` can include both kinds of servers


def test_reasons_that_have_not_occurred_are_counted_from_0() -> None:
    """Prometheus sees no increase if a series is missing and then starts at 1."""
    found = samples(text_of(Scrape()))
    assert {found[f"vllm:request_success_total|finished_reason={reason}"] for reason in FinishReason} == {0}


def test_the_page_has_the_row_of_every_alias() -> None:
    """If this fails, the message has the rows that docs/metrics.md should have."""
    rows = [line for line in DOC.read_text().splitlines() if line.startswith(f"| `{VLLM_PREFIX}")]
    declared = "\n".join(alias.row for alias in ALIASES)
    assert "\n".join(rows) == declared, declared


def test_they_are_added_to_motet_s_metrics_and_only_on_request() -> None:
    without, both = text_of(a_cell(), Metrics()), text_of(a_cell())
    assert VLLM_PREFIX not in without
    families = {family.name: family.type for family in text_string_to_metric_families(both)}
    assert {name.removeprefix(VLLM_PREFIX): kind for name, kind in families.items() if VLLM_PREFIX in name} == IN_VLLM
    assert [line for line in both.splitlines() if VLLM_PREFIX not in line] == without.splitlines()


def test_a_server_has_one_series_of_each_which_is_the_sum_over_its_workers() -> None:
    """An endpoint picker takes the first series that it finds."""
    found = samples(text_of(a_cell()))
    assert found["vllm:num_requests_running"] == 4
    assert found["vllm:generation_tokens_total"] == 10
    assert found["vllm:kv_cache_usage_perc"] == found["vllm:gpu_cache_usage_perc"] == (20 + 60) / 200
    assert found[f"vllm:cache_config_info|block_size=16|num_gpu_blocks={3 * 1024}"] == 1
    text = text_of(a_cell())
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"):
        assert len(re.findall(rf"^vllm:{name}\b", text, re.MULTILINE)) == 1


def test_choices_that_wait_for_capacity_in_the_router_count_as_waiting() -> None:
    """They wait in the router, not in an engine. Without them an endpoint picker would take a full server for an idle
    one."""
    assert samples(text_of(a_cell()))["vllm:num_requests_waiting"] == 2 + 16


def test_without_an_answer_of_an_engine_its_figures_are_absent() -> None:
    silent = Scrape(engines=[engine_sample()])
    found = samples(text_of(silent))
    assert "vllm:num_requests_running" not in found
    assert "vllm:cache_config_info|block_size=16|num_gpu_blocks=1024" in found
    assert not any(name.startswith("vllm:cache_config_info") for name in samples(text_of(Scrape())))


def test_groups_have_the_same_figures_under_both_names_and_vllm_s_labels() -> None:
    metrics = Metrics(MetricPrefix.VLLM)
    group = TimedGroup(metrics.of("m"), 2, started_s=1.0)
    group.step([ShownChoice(0, None), ShownChoice(1, FinishReason.LENGTH)], 2.0)
    group.step([ShownChoice(0, FinishReason.STOP)], 3.0)
    group.end(3.5, tokens={0: 2, 1: 1})
    text = text_of(Scrape(), metrics)
    found = samples(text)
    assert found["vllm:time_to_first_token_seconds_sum"] == 1.0
    assert found["vllm:e2e_request_latency_seconds_bucket|le=2.5"] == 1
    assert found["vllm:request_success_total|finished_reason=stop"] == 1
    for alias in (alias for declared in (*OBSERVED, *COUNTED) for alias in declared.aliases):
        name = alias.exposed_name.removeprefix(VLLM_PREFIX) + ("_sum" if alias.kind is MetricKind.HISTOGRAM else "")
        (motet, *_), (vllm, *_) = (
            re.findall(rf"^{prefix}{name}(\S*) (\S+)$", text, re.MULTILINE) for prefix in (PREFIX, VLLM_PREFIX)
        )
        assert motet[1] == vllm[1]
        assert 'engine="0"' in vllm[0] and 'model_name="m"' in vllm[0]


def test_a_group_s_time_is_divided_into_queue_prefill_and_decode() -> None:
    metrics = Metrics(MetricPrefix.VLLM)
    group = TimedGroup(metrics.of("m"), 2, started_s=1.0)
    group.step([ShownChoice(0, None)], 4.0)
    group.step([ShownChoice(0, FinishReason.STOP), ShownChoice(1, None)], 6.0)
    group.record.start_choices([1])
    group.step([ShownChoice(1, FinishReason.STOP)], 9.0)
    group.end(9.5, tokens={0: 2, 1: 2}, queue_s=0.5)
    routing = RoutingFigures(queue_seconds=[0, 0, 0, 0, 1, *(0 for _ in QUEUE_S[4:])], queue_seconds_sum=0.5)
    found = samples(text_of(Scrape(routing=routing), metrics))
    assert found["vllm:request_queue_time_seconds_sum"] == 0.5
    assert found["vllm:request_prefill_time_seconds_sum"] == 4.0 - 1.0 - 0.5
    assert found["vllm:request_decode_time_seconds_sum"] == (6.0 - 4.0) + (9.0 - 6.0)
    assert found["vllm:request_decode_time_seconds_count"] == 2
    assert found["vllm:request_inference_time_seconds_sum"] == (6.0 - 1.0 - 0.5) + (9.0 - 6.0)


def test_pulls_and_steps_have_vllm_s_names() -> None:
    stats = EngineStats(
        step_tokens=(1, 1, *(0 for _ in STEP_TOKENS[1:])),
        step_tokens_sum=9,
        transfers=2,
        transfer_bytes=300,
        transfer_descriptors=5,
        transfer_failures={"timeout": 3},
        leases_expired=4,
    )
    found = samples(text_of(Scrape(engines=[engine_sample("decode-0", stats)])))
    assert (found["vllm:iteration_tokens_total_count"], found["vllm:iteration_tokens_total_sum"]) == (2, 9)
    assert found["vllm:iteration_tokens_total_bucket|le=1.0"] == 1
    assert (found["vllm:nixl_bytes_transferred_count"], found["vllm:nixl_bytes_transferred_sum"]) == (2, 300)
    assert found["vllm:nixl_num_descriptors_sum"] == 5
    assert found["vllm:nixl_num_failed_transfers_total|kind=timeout"] == 3
    assert found["vllm:nixl_num_kv_expired_reqs_total"] == 4


def test_readers_of_a_vllm_server_can_read_it() -> None:
    scrape = scrape_of(text_of(a_cell()).encode())
    assert (scrape.block_size, scrape.ranks) == (16, 1)
    assert scrape.stats.choices_waiting == 18
