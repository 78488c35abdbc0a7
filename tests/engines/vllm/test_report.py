"""What a gateway takes a vLLM server to be, from what the server tells."""

from dataclasses import replace

import pytest

from motet.engines.base import WorkerState
from motet.engines.vllm.report import (
    Card,
    EventSource,
    Start,
    cards_in,
    event_source_in,
    reachable,
    report_of,
    version_in,
)
from motet.engines.vllm.scrape import stats_of
from motet.engines.wire import EngineReport
from motet.errors import OtherServerError
from motet.ids import ModelName
from motet.transfer.ticket import TransferAddress
from motet.types import UNKNOWN_VOCABULARY, EngineInfo, EngineKind, ModelCard, Role
from tests.engines.vllm.test_scrape import SCRAPE

OWN = Card(id="smollm2", root="/models/smollm2", max_model_len=4096)
ADAPTER = Card(id="sql", root="/adapters/sql", parent="smollm2")
EVENTS = EventSource(endpoint="tcp://*:5557", replay_endpoint="tcp://0.0.0.0:5558")
START = Start(engine_id="http://p-1:8000@7", version="0.32.0", events=EVENTS)


def test_a_report_says_what_is_known_and_that_the_rest_is_not() -> None:
    assert report_of("http://p-1:8000", START, SCRAPE, (OWN, ADAPTER), role=Role.PREFILL) == EngineReport(
        version="0.32.0",
        engine_id="http://p-1:8000@7",
        state=WorkerState.READY,
        info=EngineInfo(
            model=ModelName("smollm2"),
            max_model_len=4096,
            vocab_size=UNKNOWN_VOCABULARY,
            block_size=128,
            num_blocks=364,
            bytes_per_block=0,
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
        stats=stats_of(SCRAPE),
        block_events="tcp://p-1:5557",
        block_replay="tcp://p-1:5558",
        models=(
            ModelCard(name=ModelName("sql"), root="/adapters/sql", parent=ModelName("smollm2"), max_model_len=4096),
        ),
    )


def test_without_a_role_it_does_all() -> None:
    assert report_of("http://p-1:8000", START, SCRAPE, (OWN,), role=None).info.role is Role.BOTH


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [("http://p-1", "p-1", 80), ("https://p-1", "p-1", 443), ("http://[::1]:8000", "::1", 8000)],
)
def test_its_address_is_that_of_its_url(url: str, host: str, port: int) -> None:
    report = report_of(url, START, SCRAPE, (OWN,), role=None)
    assert report.info.transfer == TransferAddress(START.engine_id, host, port)


def test_nobody_follows_the_blocks_of_several_ranks_or_of_a_server_that_tells_nothing() -> None:
    silent = replace(START, events=None)
    for start, scrape in ((START, replace(SCRAPE, ranks=2)), (silent, SCRAPE)):
        report = report_of("http://p-1:8000", start, scrape, (OWN,), role=None)
        assert (report.block_events, report.block_replay) == (None, None)


def test_a_publisher_without_a_replay_is_followed_all_the_same() -> None:
    start = replace(START, events=EventSource(endpoint="tcp://127.0.0.1:5557"))
    report = report_of("http://p-1:8000", start, SCRAPE, (OWN,), role=None)
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


def test_the_first_card_is_a_model_of_its_own() -> None:
    body = (
        b'{"object":"list","data":[{"id":"sql","object":"model","owned_by":"vllm","root":"/adapters/sql",'
        b'"parent":"smollm2","max_model_len":null},{"id":"smollm2","owned_by":"vllm","root":"/models/smollm2",'
        b'"parent":null,"max_model_len":4096,"permission":[{"id":"p"}]}]}'
    )
    assert cards_in(body) == (OWN, ADAPTER)


@pytest.mark.parametrize(
    "body", [b"no", b'{"data":[]}', b'{"data":[{"id":"x"}]}', b'{"data":[{"id":"x","parent":"y","max_model_len":9}]}']
)
def test_a_list_without_a_model_of_its_own_is_that_of_another_server(body: bytes) -> None:
    with pytest.raises(OtherServerError):
        cards_in(body)


def test_event_sources_are_taken_from_the_only_rank() -> None:
    one = b'{"0":{"endpoint":"tcp://*:5557","replay_endpoint":null,"topic":""}}'
    two = b'{"0":{"endpoint":"tcp://*:5557"},"1":{"endpoint":"tcp://*:5558"}}'
    assert event_source_in(one) == EventSource(endpoint="tcp://*:5557")
    assert (event_source_in(two), event_source_in(b"{}")) == (None, None)
    with pytest.raises(OtherServerError):
        event_source_in(b"[]")


def test_the_version_is_what_it_says() -> None:
    assert version_in(b'{"version":"0.32.0"}') == "0.32.0"
    with pytest.raises(OtherServerError):
        version_in(b"<html>")


@pytest.mark.parametrize(
    ("role", "connector", "fetches"),
    [(None, True, True), (None, False, False), (Role.DECODE, False, True), (Role.PREFILL, False, True)],
)
def test_who_has_no_connector_that_shows_has_to_be_named_for_a_role(
    role: Role | None, connector: bool, fetches: bool
) -> None:
    report = report_of("http://p-1:8000", START, replace(SCRAPE, connector=connector), (OWN,), role=role)
    assert (report.info.transfer is not None) is fetches
