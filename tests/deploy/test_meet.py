"""Workers meet before a request needs it."""

import msgspec
import pytest

from motet.deploy.meet import meet_all
from motet.engine import Worker
from motet.engine_orders import Connect, Done, EngineOrder, OrderAnswer
from motet.errors import EngineDiedError
from motet.testing.fake_engine import FakeEngine, FakeLeases
from tests.routing.kinds import info_of
from tests.routing.scene import script

pytestmark = pytest.mark.anyio


class ConnectingEngine(FakeEngine):
    """An engine that remembers which addresses it was given. One of them cannot be reached."""

    def __init__(self, name: str, met: set[tuple[str, str]], **other: object) -> None:
        super().__init__(script, info=msgspec.structs.replace(info_of(name), **other))
        self._name = name
        self._met = met

    async def send(self, order: EngineOrder) -> OrderAnswer:
        assert isinstance(order, Connect)
        maker = order.address.engine_id.partition(",")[0]
        self._met.add((self._name, maker))
        if maker == "prefill-a-motet-9":
            raise EngineDiedError("it cannot be reached")
        return Done()


def workers(met: set[tuple[str, str]], *names: str) -> list[Worker]:
    return [Worker(name, ConnectingEngine(name, met), "there") for name in names]


OTHERS = (
    "prefill-a-motet-0",
    "prefill-a-motet-9",
    "prefill-a-vllm-0",
    "prefill-b-motet-0",
    "decode-a-motet-0",
    "decode-a-vllm-0",
    "both-a-motet-0",
)


async def test_a_decode_worker_meets_the_prefill_workers_whose_kv_it_could_read() -> None:
    met: set[tuple[str, str]] = set()
    newcomer, *others = workers(met, "decode-a-motet-1", *OTHERS)
    await meet_all(newcomer, others)
    assert met == {("decode-a-motet-1", "prefill-a-motet-0"), ("decode-a-motet-1", "prefill-a-motet-9")}


async def test_a_prefill_worker_is_met_by_the_decode_workers_that_could_read_its_kv() -> None:
    met: set[tuple[str, str]] = set()
    newcomer, *others = workers(met, "prefill-a-vllm-1", *OTHERS, "decode-a-vllm-1")
    await meet_all(newcomer, [newcomer, *others])
    assert met == {("decode-a-vllm-0", "prefill-a-vllm-1"), ("decode-a-vllm-1", "prefill-a-vllm-1")}


async def test_workers_with_another_dtype_do_not_meet() -> None:
    met: set[tuple[str, str]] = set()
    other = Worker("d", ConnectingEngine("decode-a-motet-0", met, dtype="bfloat16"), "there")
    await meet_all(other, workers(met, "prefill-a-motet-0"))
    assert met == set()


async def test_engines_that_cannot_be_introduced_meet_by_a_first_transfer() -> None:
    leases = FakeLeases()
    prefill, decode = (
        Worker(name, FakeEngine(script, info=info_of(name), leases=leases), "there")
        for name in ("prefill-a-vllm-0", "decode-a-vllm-0")
    )
    await meet_all(decode, [prefill])
    assert isinstance(prefill.engine, FakeEngine)
    assert isinstance(decode.engine, FakeEngine)
    (made,), (asked,) = prefill.engine.prefills, decode.engine.requests
    assert (made.prompt, made.model) == (asked.prompt, asked.model) == ((1, 2), "a")
    assert asked.sampling.max_tokens == 1
    assert decode.engine.release_traces == [made.trace] == [made.request_id]
    assert decode.engine.pulls == 1
    assert leases.held == {}
    for worker in (prefill, decode):
        await worker.engine.close()


async def test_a_first_transfer_that_fails_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    prefill = Worker("p", FakeEngine(script, info=info_of("prefill-a-vllm-0")), "there")
    decode = Worker("d", FakeEngine(script, info=info_of("decode-a-vllm-0")), "there")
    await prefill.engine.close()
    await meet_all(decode, [prefill])
    assert "d cannot fetch from p: " in caplog.text
    await decode.engine.close()
