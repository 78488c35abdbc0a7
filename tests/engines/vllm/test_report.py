"""The metrics of vLLM 0.32 as it sends them, and the report that a gateway makes of a server."""

from dataclasses import replace

import pytest

from motet.engine import WorkerState
from motet.engine_info import UNKNOWN_VOCABULARY, EngineInfo, EngineKind, ModelCard
from motet.engines.openai import ListedModel
from motet.engines.vllm.report import (
    EventSource,
    ServerStart,
    VLLMScrape,
    cards_in,
    event_source_in,
    reachable,
    report_of,
    scrape_of,
    version_in,
)
from motet.engines.wire import EngineReport
from motet.errors import OtherServerError
from motet.ids import ModelName
from motet.metrics.stats import EngineStats
from motet.transfer.ticket import TransferAddress
from motet.types import Role

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
SCRAPE = VLLMScrape(
    start_s=1763769600.12,
    block_size=128,
    cache_dtype="auto",
    ranks=1,
    connector=True,
    stats=EngineStats(
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
    ),
)
CONFIG = b'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="100"} 1.0\n'


def lines_with(text: bytes, *words: bytes) -> bytes:
    return b"".join(line for line in text.splitlines(keepends=True) if any(word in line for word in words))


def test_the_needed_metrics_are_read() -> None:
    assert scrape_of(TEXT) == SCRAPE


def test_the_ranks_of_a_data_parallel_server_are_added_up() -> None:
    second = lines_with(TEXT, b'engine="0"').replace(b'engine="0"', b'engine="1"').replace(b"} 0.25", b"} 0.5")
    both = scrape_of(TEXT + second)
    assert (both.ranks, both.block_size, both.start_s) == (2, 128, SCRAPE.start_s)
    stats = both.stats
    assert (stats.blocks_total, stats.blocks_used) == (728, 91 + 182)
    assert (stats.choices_running, stats.choices_waiting) == (6, 4)
    assert (stats.prompt_tokens, stats.cached_tokens) == (3_000_000, 1_000_000)
    assert (stats.transfers, stats.transfer_seconds_sum, stats.leases_expired) == (8, 1.0, 12)


def test_without_sources_prefill_tokens_are_the_prompt_tokens_that_were_not_cached() -> None:
    text = b"".join(line for line in TEXT.splitlines(keepends=True) if b"by_source" not in line)
    stats = scrape_of(text).stats
    assert (stats.prompt_tokens, stats.cached_tokens, stats.prefill_tokens) == (1_500_000, 999, 1_499_001)


def test_metrics_can_lack_the_connector_and_the_time_of_start() -> None:
    scrape = scrape_of(CONFIG % 0)
    assert (scrape.start_s, scrape.block_size, scrape.cache_dtype) == (None, 16, "auto")
    assert scrape.stats == EngineStats(blocks_total=100)


def test_an_unknown_number_of_blocks_is_zero() -> None:
    assert scrape_of(b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n').stats.blocks_total == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "no metrics of vLLM"),
        (b"<html>\n", "no metrics of vLLM"),
        (b"motet_groups_running 3.0\nprocess_start_time_seconds 1.0\n", "no metrics of vLLM"),
        (CONFIG % 0 + b'vllm:num_requests_running{engine="0"} many\n', "cannot be read"),
        (CONFIG % 0 + b'vllm:num_requests_running{engine="0"} NaN\n', "cannot be read"),
        (CONFIG % 0 + b'vllm:prompt_tokens_total{engine="0"} +Inf\n', "cannot be read"),
    ],
)
def test_metrics_of_another_kind_of_server_are_recognised(text: bytes, message: str) -> None:
    with pytest.raises(OtherServerError, match=message):
        scrape_of(text)


OWN = ListedModel(id="smollm2", root="/models/smollm2", max_model_len=4096)
ADAPTER = ListedModel(id="sql", root="/adapters/sql", parent="smollm2")
EVENTS = EventSource(endpoint="tcp://*:5557", replay_endpoint="tcp://0.0.0.0:5558")
START = ServerStart(engine_id="http://p-1:8000@7", version="0.32.0", events=EVENTS)


def test_a_report_has_what_is_known_and_marks_the_rest_as_unknown() -> None:
    assert report_of("http://p-1:8000", START, scrape=SCRAPE, cards=(OWN, ADAPTER), role=Role.PREFILL) == EngineReport(
        version="0.32.0",
        engine_id="http://p-1:8000@7",
        state=WorkerState.READY,
        info=EngineInfo(
            model=ModelName("smollm2"),
            root="/models/smollm2",
            max_model_len=4096,
            vocab_size=UNKNOWN_VOCABULARY,
            block_size=128,
            num_blocks=364,
            max_num_seqs=1024,
            role=Role.PREFILL,
            eos_token_ids=(),
            dtype="auto",
            device="remote",
            fingerprint="vllm-0.32.0-smollm2",
            transfer=TransferAddress("http://p-1:8000@7", "p-1", 8000),
            kind=EngineKind.VLLM,
            ticket_readers=1,
        ),
        stats=SCRAPE.stats,
        block_events="tcp://p-1:5557",
        block_replay="tcp://p-1:5558",
        models=(
            ModelCard(name=ModelName("sql"), root="/adapters/sql", parent=ModelName("smollm2"), max_model_len=4096),
        ),
    )


def reported(
    url: str = "http://p-1:8000", *, start: ServerStart = START, scrape: VLLMScrape = SCRAPE, role: Role | None = None
) -> EngineReport:
    return report_of(url, start, scrape=scrape, cards=(OWN,), role=role)


def test_without_a_role_a_server_does_both() -> None:
    assert reported().info.role is Role.BOTH


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [("http://p-1", "p-1", 80), ("https://p-1", "p-1", 443), ("http://[::1]:8000", "::1", 8000)],
)
def test_the_address_of_a_server_comes_from_its_url(url: str, host: str, port: int) -> None:
    assert reported(url).info.transfer == TransferAddress(START.engine_id, host, port)


def test_blocks_of_several_ranks_or_of_a_server_without_events_are_not_followed() -> None:
    for report in (reported(scrape=replace(SCRAPE, ranks=2)), reported(start=replace(START, events=None))):
        assert (report.block_events, report.block_replay) == (None, None)


def test_a_publisher_without_a_replay_is_followed() -> None:
    report = reported(start=replace(START, events=EventSource(endpoint="tcp://127.0.0.1:5557")))
    assert (report.block_events, report.block_replay) == ("tcp://127.0.0.1:5557", None)


@pytest.mark.parametrize(
    ("endpoint", "host", "address"),
    [
        ("tcp://*:5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://0.0.0.0:5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://[::]:5557", "fd00::7", "tcp://[fd00::7]:5557"),
        ("tcp://:::5557", "p-1", "tcp://p-1:5557"),
        ("tcp://10.0.0.9:5557", "10.0.0.7", "tcp://10.0.0.9:5557"),
        ("ipc:///run/events", "10.0.0.7", "ipc:///run/events"),
    ],
)
def test_an_address_that_is_bound_everywhere_is_reached_at_the_host_of_the_server(
    endpoint: str, host: str, address: str
) -> None:
    assert reachable(endpoint, host) == address


def test_the_servers_own_model_comes_before_its_adapters() -> None:
    body = (
        b'{"object":"list","data":[{"id":"sql","object":"model","owned_by":"vllm","root":"/adapters/sql",'
        b'"parent":"smollm2","max_model_len":null},{"id":"smollm2","owned_by":"vllm","root":"/models/smollm2",'
        b'"parent":null,"max_model_len":4096,"permission":[{"id":"p"}]}]}'
    )
    assert cards_in(body) == (OWN, ADAPTER)


@pytest.mark.parametrize(
    "body", [b"no", b'{"data":[]}', b'{"data":[{"id":"x"}]}', b'{"data":[{"id":"x","parent":"y","max_model_len":9}]}']
)
def test_a_list_without_a_base_model_means_another_kind_of_server(body: bytes) -> None:
    with pytest.raises(OtherServerError):
        cards_in(body)


def test_event_sources_are_taken_from_the_only_rank() -> None:
    one = b'{"0":{"endpoint":"tcp://*:5557","replay_endpoint":null,"topic":""}}'
    two = b'{"0":{"endpoint":"tcp://*:5557"},"1":{"endpoint":"tcp://*:5558"}}'
    assert event_source_in(one) == EventSource(endpoint="tcp://*:5557")
    assert (event_source_in(two), event_source_in(b"{}")) == (None, None)
    with pytest.raises(OtherServerError):
        event_source_in(b"[]")


def test_the_version_is_read() -> None:
    assert version_in(b'{"version":"0.32.0"}') == "0.32.0"
    with pytest.raises(OtherServerError):
        version_in(b"<html>")


@pytest.mark.parametrize(
    ("role", "connector", "fetches"),
    [(None, True, True), (None, False, False), (Role.DECODE, False, True), (Role.PREFILL, False, True)],
)
def test_a_server_without_a_visible_connector_transfers_only_if_it_has_a_role(
    role: Role | None, connector: bool, fetches: bool
) -> None:
    assert (reported(scrape=replace(SCRAPE, connector=connector), role=role).info.transfer is not None) is fetches
