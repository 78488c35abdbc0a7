"""The exposition: every metric documented, engine figures as each engine gave them, group figures as they happened."""

import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from motet.deploy.figures import block_size_in, figures_in
from motet.engines.fake import fake_info
from motet.metrics.names import ENGINE_COUNTS, ENGINE_FIGURES, ENGINE_HISTOGRAMS, PREFIX
from motet.metrics.prometheus import STEP_S, Metrics
from motet.metrics.record import GroupRecord
from motet.metrics.scraped import Scrape
from motet.transfer.base import FailureKind
from motet.transfer.figures import SECONDS
from motet.types import EngineStats, FinishReason, Role
from tests.metrics.shown import ShownChoice

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `([^`]+)` \| (\w+) \| ([^|]+) \| (.+) \|$", re.MULTILINE)


def one_worker() -> Metrics:
    return Metrics("m", {"engine-0": fake_info()})


def a_cell() -> Metrics:
    return Metrics("m", {"prefill-0": fake_info(role=Role.PREFILL), "decode-0": fake_info(role=Role.DECODE)})


def exposed(metrics: Metrics, scrape: Scrape | None = None) -> dict[str, float]:
    """Sample name with its labels, without the model's and those of the only engine, to its value."""
    samples: dict[str, float] = {}
    said = {"model_name": "m", "worker": "engine-0", "role": "both"}
    for family in text_string_to_metric_families(text_of(metrics, scrape)):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if said.get(k) != v}
            key = sample.name + "".join(f"|{k}={v}" for k, v in sorted(labels.items()))
            samples[key] = sample.value
    return samples


def text_of(metrics: Metrics, scrape: Scrape | None = None) -> str:
    return metrics.exposition(scrape or Scrape(), waiting=3).decode()


def registered(metrics: Metrics) -> Iterator[tuple[str, str]]:
    for family in metrics.registry.collect():
        yield family.name + ("_total" if family.type == "counter" else ""), family.type


def test_the_page_lists_exactly_the_metrics_there_are() -> None:
    documented = [(name, kind) for name, kind, _, _ in ROW.findall(DOC.read_text())]
    assert sorted(documented) == sorted(registered(one_worker()))


def test_the_page_names_every_label_that_not_all_have() -> None:
    labels = {counts.label: counts.name for counts in ENGINE_COUNTS} | {"reason": "bypasses"}
    page = {name: meaning for name, _, _, meaning in ROW.findall(DOC.read_text())}
    for label, name in labels.items():
        assert f"`{label}`" in page[f"{PREFIX}{name}_total"]


def test_the_page_tells_every_way_a_pull_fails() -> None:
    head, *told = re.findall(r"^\| `([a-z-]+)` \| [^|]+ \|$", DOC.read_text(), re.MULTILINE)
    assert (head, told) == ("kind", [kind.value for kind in FailureKind])


def test_every_figure_of_the_engine_is_exposed_under_its_name() -> None:
    apart = {"transfer_seconds", "transfer_seconds_sum", "transfer_failures"}
    names = [name for name in EngineStats.__struct_fields__ if name not in apart]
    stats = EngineStats(**{name: 2**place for place, name in enumerate(names)})  # each value stands for its field
    samples = exposed(one_worker(), Scrape({"engine-0": stats}))
    shown = set()
    for figure in ENGINE_FIGURES:
        name = PREFIX + figure.name + ("_total" if figure.kind == "counter" else "")
        assert samples[name] == figure.read(stats)
        shown.add(samples[name])
    assert {float(2**place) for place in range(len(names))} <= shown


def test_pull_seconds_are_a_histogram() -> None:
    counts = (2, 0, 1, *(0 for _ in SECONDS[3:]), 4)  # four took longer than the last bound
    stats = EngineStats(transfer_seconds=counts, transfer_seconds_sum=55.5)
    samples = exposed(one_worker(), Scrape({"engine-0": stats}))
    name = "motet:kv_transfer_seconds"
    assert [samples[f"{name}_bucket|le={bound}"] for bound in SECONDS] == [2, 2, *(3 for _ in SECONDS[2:])]
    assert samples[f"{name}_bucket|le=+Inf"] == samples[f"{name}_count"] == 7
    assert samples[f"{name}_sum"] == 55.5


def test_an_engine_that_never_pulled_has_an_empty_histogram() -> None:
    samples = exposed(one_worker(), Scrape({"engine-0": EngineStats()}))
    (name,) = (histogram.name for histogram in ENGINE_HISTOGRAMS)
    assert samples[f"motet:{name}_bucket|le=+Inf"] == samples[f"motet:{name}_count"] == 0


def test_failures_and_bypasses_are_counted_by_what_has_occurred() -> None:
    scrape = Scrape({"engine-0": EngineStats(transfer_failures={"stale": 2, "timeout": 1})}, {"short": 5})
    samples = exposed(one_worker(), scrape)
    assert samples["motet:kv_transfer_failures_total|kind=stale"] == 2
    assert samples["motet:kv_transfer_failures_total|kind=timeout"] == 1
    assert samples["motet:bypasses_total|reason=short"] == 5


def test_each_worker_of_a_cell_has_its_own_figures() -> None:
    scrape = Scrape({"prefill-0": EngineStats(prefills=3), "decode-0": EngineStats(transfers=2)})
    samples = exposed(a_cell(), scrape)
    assert samples["motet:prefills_total|role=prefill|worker=prefill-0"] == 3
    assert samples["motet:prefills_total|role=decode|worker=decode-0"] == 0
    assert samples["motet:kv_transfers_total|role=decode|worker=decode-0"] == 2
    facts = "|block_size=16|bytes_per_block=16|num_blocks=1024"
    assert samples[f"motet:cache_config_info|{facts[1:]}|role=prefill|worker=prefill-0"] == 1


def test_what_reads_the_counters_sums_them_over_the_workers() -> None:
    scrape = Scrape({"prefill-0": EngineStats(prefill_tokens=40), "decode-0": EngineStats(prefill_tokens=2)})
    text = text_of(a_cell(), scrape)
    assert figures_in(text).prefill_tokens == 42
    assert block_size_in(text).tokens == 16


def test_a_worker_that_gave_no_answer_has_no_samples() -> None:
    samples = exposed(a_cell(), Scrape({"decode-0": EngineStats()}))
    assert "motet:forks_total|role=decode|worker=decode-0" in samples
    assert not any("prefill-0" in name for name in samples if not name.startswith("motet:cache_config_info"))


def test_without_an_engine_its_figures_are_absent() -> None:
    samples = exposed(one_worker())
    assert not any(name.startswith("motet:forks") for name in samples)
    assert samples["motet:groups_without_first_token"] == 3


def test_a_group_leaves_its_times_and_counts() -> None:
    metrics = one_worker()
    record = GroupRecord(num_choices=2, started_s=100.0)
    metrics.group_opened(record, prompt_tokens=7, max_tokens=9)
    record.step([ShownChoice(0, None)], 101.0)
    record.step([ShownChoice(0, None), ShownChoice(1, None)], 102.0)
    record.step([ShownChoice(0, FinishReason.STOP)], 103.0)
    record.step([ShownChoice(1, FinishReason.LENGTH)], 106.0)
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


def test_times_between_steps_are_a_histogram() -> None:
    metrics = one_worker()
    for since_s in (0.0025, 0.003, 7.0):
        metrics.steps.add(since_s)
    samples = exposed(metrics)
    name = "motet:inter_token_latency_seconds"
    assert [samples[f"{name}_bucket|le={bound}"] for bound in STEP_S] == [1, *(2 for _ in STEP_S[1:])]
    assert samples[f"{name}_bucket|le=+Inf"] == samples[f"{name}_count"] == 3
    assert samples[f"{name}_sum"] == 7.0055


def test_a_group_that_ended_early_leaves_no_times_it_does_not_have() -> None:
    metrics = one_worker()
    metrics.group_ended(GroupRecord(num_choices=2, started_s=0.0), status=499, tokens={}, now_s=1.0)
    samples = exposed(metrics)
    assert samples["motet:time_to_first_token_seconds_count"] == 0
    assert samples["motet:finish_spread_seconds_count"] == 0
    assert samples["motet:groups_total|status=499"] == 1


def test_two_apps_in_one_process_share_nothing() -> None:
    first, second = one_worker(), one_worker()
    first.http_request(handler="/health", method="GET", status=200)
    assert "motet:http_requests_total|handler=/health|method=GET|status=200" in exposed(first)
    assert "motet:http_requests_total|handler=/health|method=GET|status=200" not in exposed(second)
