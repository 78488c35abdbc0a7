"""The metrics of a vLLM 0.32, in the lines it writes."""

from dataclasses import replace

import pytest

from motet.engines.vllm.scrape import Scrape, scrape_of, stats_of
from motet.errors import OtherServerError
from motet.types import EngineStats

TEXT = b"""\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.76376960012e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="smollm2"} 3.0
vllm:num_requests_waiting{engine="0",model_name="smollm2"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="smollm2",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="smollm2"} 0.25
vllm:prefix_cache_hits_total{engine="0",model_name="smollm2"} 999.0
vllm:num_preemptions_total{engine="0",model_name="smollm2"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="smollm2"} 1.5e+06
vllm:prompt_tokens_created{engine="0",model_name="smollm2"} 1.7637696e+09
vllm:prompt_tokens_by_source_total{engine="0",model_name="smollm2",source="local_compute"} 900000.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="smollm2",source="local_cache_hit"} 500000.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="smollm2",source="external_kv_transfer"} 100000.0
vllm:generation_tokens_total{engine="0",model_name="smollm2"} 70.0
vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0",kv_cache_dtype_skip_layers="[\\"a} b\\"]",\
num_gpu_blocks="364",num_gpu_blocks_override="None"} 1.0
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="0.005",model_name="smollm2"} 2.0
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="smollm2"} 4.0
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="smollm2"} 0.5
vllm:nixl_bytes_transferred_sum{engine="0",model_name="smollm2"} 4096.0
vllm:nixl_num_descriptors_sum{engine="0",model_name="smollm2"} 60.0
vllm:nixl_num_failed_transfers_total{engine="0",model_name="smollm2"} 5.0
vllm:nixl_num_kv_expired_reqs_total{engine="0",model_name="smollm2"} 6.0
"""
SCRAPE = Scrape(
    start_s=1763769600.12,
    block_size=128,
    num_blocks=364,
    cache_dtype="auto",
    ranks=1,
    running=3,
    waiting=2,
    blocks_used=91,
    prompt_tokens=1_500_000,
    computed_tokens=900_000,
    cached_tokens=500_000,
    generated_tokens=70,
    preemptions=1,
    connector=True,
    transfers=4,
    transfer_bytes=4096,
    transfer_descriptors=60,
    transfer_seconds_sum=0.5,
    transfers_failed=5,
    leases_expired=6,
)
CONFIG = b'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="100"} 1.0\n'


def lines_with(text: bytes, *words: bytes) -> bytes:
    return b"".join(line for line in text.splitlines(keepends=True) if any(word in line for word in words))


def test_what_is_wanted_is_read_and_nothing_else() -> None:
    assert scrape_of(TEXT) == SCRAPE


def test_the_ranks_of_a_data_parallel_server_are_added_up() -> None:
    second = lines_with(TEXT, b'engine="0"').replace(b'engine="0"', b'engine="1"').replace(b"} 0.25", b"} 0.5")
    both = scrape_of(TEXT + second)
    assert (both.ranks, both.block_size, both.start_s) == (2, 128, SCRAPE.start_s)
    assert (both.num_blocks, both.blocks_used) == (728, 91 + 182)
    assert (both.running, both.waiting, both.prompt_tokens, both.cached_tokens) == (6, 4, 3_000_000, 1_000_000)
    assert (both.transfers, both.transfer_seconds_sum, both.leases_expired) == (8, 1.0, 12)


def test_one_that_does_not_tell_sources_has_computed_what_was_not_cached() -> None:
    text = b"".join(line for line in TEXT.splitlines(keepends=True) if b"by_source" not in line)
    scrape = scrape_of(text)
    assert (scrape.prompt_tokens, scrape.cached_tokens, scrape.computed_tokens) == (1_500_000, 999, 1_499_001)


def test_without_a_connector_and_with_several_processes_there_is_less() -> None:
    scrape = scrape_of(CONFIG % 0)
    assert (scrape.start_s, scrape.block_size, scrape.num_blocks, scrape.cache_dtype) == (None, 16, 100, "auto")
    assert (scrape.transfers, scrape.prompt_tokens, scrape.running, scrape.blocks_used) == (0, 0, 0, 0)


def test_blocks_that_are_not_counted_yet_are_none() -> None:
    assert scrape_of(b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n').num_blocks == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "no figures of vLLM"),
        (b"<html>\n", "no figures of vLLM"),
        (b"motet_groups_running 3.0\nprocess_start_time_seconds 1.0\n", "no figures of vLLM"),
        (CONFIG % 0 + b'vllm:num_requests_running{engine="0"} many\n', "cannot be read"),
        (CONFIG % 0 + b'vllm:num_requests_running{engine="0"} NaN\n', "cannot be read"),
        (CONFIG % 0 + b'vllm:prompt_tokens_total{engine="0"} +Inf\n', "cannot be read"),
    ],
)
def test_figures_of_another_server_are_told_apart(text: bytes, message: str) -> None:
    with pytest.raises(OtherServerError, match=message):
        scrape_of(text)


def test_the_figures_have_our_names() -> None:
    assert stats_of(SCRAPE) == EngineStats(
        choices_running=3,
        choices_waiting=2,
        blocks_total=364,
        blocks_used=91,
        prompt_tokens=1_500_000,
        prefill_tokens=900_000,
        cached_tokens=500_000,
        generated_tokens=70,
        preemptions=1,
        transfers=4,
        transfer_bytes=4096,
        transfer_descriptors=60,
        transfer_seconds_sum=0.5,
        transfer_failures={"untold": 5},
        leases_expired=6,
    )
    assert stats_of(replace(SCRAPE, transfers_failed=0)).transfer_failures == {}
