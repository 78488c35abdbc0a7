"""Workers are connected before a request needs the connection."""

import msgspec
import pytest

from motet.deploy.kv_connections import connect_pairs
from motet.engine import Worker
from motet.engine_orders import Connect, Done, EngineOrder, OrderAnswer
from motet.errors import EngineDiedError
from motet.testing.fake_engine import FakeEngine, FakeLeases
from motet.transfer.ticket import TransportKind
from tests.routing.kinds import info_of
from tests.routing.scene import script

pytestmark = pytest.mark.anyio


class ConnectingEngine(FakeEngine):
    """An engine that records the addresses to which it is connected. One of them cannot be reached."""

    def __init__(self, name: str, connected: set[tuple[str, str]], **other: object) -> None:
        super().__init__(script, info=msgspec.structs.replace(info_of(name), **other))
        self._name = name
        self._connected = connected

    async def send(self, order: EngineOrder) -> OrderAnswer:
        assert isinstance(order, Connect)
        prefill = order.address.engine_id.partition(",")[0]
        self._connected.add((self._name, prefill))
        if prefill == "prefill-a-motet-9":
            raise EngineDiedError("it cannot be reached")
        return Done()


def workers(connected: set[tuple[str, str]], *names: str) -> list[Worker]:
    return [Worker(name, ConnectingEngine(name, connected), "there") for name in names]


OTHERS = (
    "prefill-a-motet-0",
    "prefill-a-motet-9",
    "prefill-a-vllm-0",
    "prefill-b-motet-0",
    "decode-a-motet-0",
    "decode-a-vllm-0",
    "both-a-motet-0",
)


async def test_a_decode_worker_is_connected_to_prefill_workers_whose_kv_it_can_read() -> None:
    connected: set[tuple[str, str]] = set()
    new, *others = workers(connected, "decode-a-motet-1", *OTHERS)
    await connect_pairs(new, others)
    assert connected == {("decode-a-motet-1", "prefill-a-motet-0"), ("decode-a-motet-1", "prefill-a-motet-9")}


async def test_decode_workers_that_can_read_its_kv_are_connected_to_a_prefill_worker() -> None:
    connected: set[tuple[str, str]] = set()
    new, *others = workers(connected, "prefill-a-vllm-1", *OTHERS, "decode-a-vllm-1")
    await connect_pairs(new, [new, *others])
    assert connected == {("decode-a-vllm-0", "prefill-a-vllm-1"), ("decode-a-vllm-1", "prefill-a-vllm-1")}


async def test_workers_with_different_dtypes_are_not_connected() -> None:
    connected: set[tuple[str, str]] = set()
    other = Worker("d", ConnectingEngine("decode-a-motet-0", connected, dtype="bfloat16"), "there")
    await connect_pairs(other, workers(connected, "prefill-a-motet-0"))
    assert connected == set()


async def test_workers_with_different_transports_are_not_connected_and_the_log_has_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    connected: set[tuple[str, str]] = set()
    nixl, shared = TransportKind.NIXL, TransportKind.SHARED_MEMORY
    decode = Worker("d", ConnectingEngine("decode-a-motet-0", connected, transfer_backend=nixl), "there")
    prefill = Worker("p", ConnectingEngine("prefill-a-motet-0", connected, transfer_backend=shared), "there")
    await connect_pairs(decode, [prefill])
    assert connected == set()
    assert "d moves KV with nixl, p with shared-memory" in caplog.text
    assert "--kv-transfer-backend" in caplog.text


async def test_engines_without_a_connect_order_connect_by_a_first_transfer() -> None:
    leases = FakeLeases()
    prefill, decode = (
        Worker(name, FakeEngine(script, info=info_of(name), leases=leases), "there")
        for name in ("prefill-a-vllm-0", "decode-a-vllm-0")
    )
    await connect_pairs(decode, [prefill])
    assert isinstance(prefill.engine, FakeEngine)
    assert isinstance(decode.engine, FakeEngine)
    (prefilled,), (generated,) = prefill.engine.prefills, decode.engine.requests
    assert (prefilled.prompt, prefilled.model) == (generated.prompt, generated.model) == ((1, 2), "a")
    assert generated.sampling.max_tokens == 1
    assert decode.engine.record.release_traces == [prefilled.trace] == [prefilled.request_id]
    assert decode.engine.record.pulls == 1
    assert leases.held == {}
    for worker in (prefill, decode):
        await worker.engine.close()


async def test_a_first_transfer_that_fails_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    prefill = Worker("p", FakeEngine(script, info=info_of("prefill-a-vllm-0")), "there")
    decode = Worker("d", FakeEngine(script, info=info_of("decode-a-vllm-0")), "there")
    await prefill.engine.close()
    await connect_pairs(decode, [prefill])
    assert "d cannot fetch from p: " in caplog.text
    await decode.engine.close()
