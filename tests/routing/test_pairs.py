"""Pairs of prefill and decode workers with the same kind of KV, and tickets whose maker has no reader."""

import asyncio
import logging

import msgspec
import pytest

from motet.engine import WorkerState
from motet.engine_info import EngineKind
from motet.ids import ModelName
from motet.metrics.routing import TicketLog
from motet.routing.router import Router
from motet.routing.workers.worker_facts import pair_key
from motet.testing.fake_engine import fake_info
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest
from tests.clock import settle
from tests.routing.kinds import ADAPTER, FRENCH, A, KindsScene
from tests.routing.scene import ControlledPrefill, Received, group, uninterrupted

pytestmark = pytest.mark.anyio

MIXED = ("prefill-a-vllm-0", "decode-a-vllm-0", "prefill-a-motet-0", "decode-a-motet-0")


def of_a(name: str = "g", *, n: int = 2, model: ModelName = A) -> GenerateRequest:
    return msgspec.structs.replace(group(name, n=n), model=model)


async def answered(server: KindsScene, request: GenerateRequest) -> Received:
    return await Received().read(server.router.generate(request), request)


def prefilled(server: KindsScene) -> list[str]:
    return [name for name, engine in server.engines.items() if engine.prefills]


def generating(server: KindsScene) -> list[str]:
    return [name for name, engine in server.engines.items() if engine.requests]


async def ticket_of(server: KindsScene, name: str) -> Ticket:
    return await server.engines[name].prefill(of_a("t"))


@pytest.mark.parametrize(
    "other",
    [
        {"kind": EngineKind.VLLM},
        {"model": ModelName("other")},
        {"model_digest": "5e0c"},
        {"dtype": "bfloat16"},
        {"fingerprint": "motet-1_kernels-1f-int8_x86_64-AVX512_none-same"},
        {"block_size": 128},
        {"bytes_per_block": 17},
    ],
)
async def test_kv_is_equal_only_if_kind_model_weights_and_blocks_are(other: dict[str, object]) -> None:
    info = fake_info()
    assert pair_key(info) == pair_key(msgspec.structs.replace(info, max_model_len=1, num_blocks=1, device="other"))
    assert pair_key(info) != pair_key(msgspec.structs.replace(info, **other))


async def test_a_group_is_prefilled_and_generated_by_workers_of_one_kind() -> None:
    server = KindsScene(*MIXED)
    complete = await uninterrupted(of_a())
    for number in range(6):
        assert await answered(server, of_a(f"g{number}")) == complete
    assert sum(len(engine.prefills) for engine in server.engines.values()) == 6
    assert sum(engine.record.pulls for engine in server.engines.values()) == 6


async def test_prefill_is_used_only_if_a_ready_worker_could_read_its_ticket() -> None:
    server = KindsScene("prefill-a-vllm-0", "decode-a-vllm-0", "both-a-motet-0")
    await answered(server, of_a("paired"))
    assert prefilled(server) == ["prefill-a-vllm-0"]
    server.fleet.mark("decode-a-vllm-0", WorkerState.DRAINING)
    await answered(server, of_a("alone"))
    assert len(server.engines["prefill-a-vllm-0"].prefills) == 1
    assert server.router.figures().bypasses["prefill-down"] == 1
    server.fleet.remove("prefill-a-vllm-0")
    assert server.router.figures().bypasses["prefill-down"] == 1  # a counter does not disappear


async def test_for_an_adapter_both_workers_of_a_pair_must_have_it() -> None:
    server = KindsScene("prefill-a-vllm-0", "decode-a-vllm-0", "decode-a-vllm-1")
    server.offer("decode-a-vllm-1", ADAPTER)
    await answered(server, of_a("one side", model=FRENCH))
    assert (prefilled(server), generating(server)) == ([], ["decode-a-vllm-1"])
    server.offer("prefill-a-vllm-0", ADAPTER)
    await answered(server, of_a("both", model=FRENCH))
    assert (prefilled(server), generating(server)) == (["prefill-a-vllm-0"], ["decode-a-vllm-1"])


@pytest.mark.parametrize("n", [2, 6])
async def test_a_ticket_without_readers_is_released_at_once_and_the_group_computes(n: int) -> None:
    """If the group was to be split, its parts do not get the ticket."""
    server = KindsScene("prefill-a-motet-0", "decode-a-motet-0", "both-a-vllm-0", spread_choices=4)
    server.engines["both-a-vllm-0"].scenario.fail_after = {}
    controlled = ControlledPrefill()
    server.engines["prefill-a-motet-0"].during_prefill = controlled
    request = of_a(n=n)
    reading = asyncio.create_task(answered(server, request))
    await controlled.entered.wait()
    server.fleet.mark("decode-a-motet-0", WorkerState.DEAD)
    controlled.may_end.set()
    assert await reading == await uninterrupted(request)
    assert generating(server) == ["both-a-vllm-0"]
    assert sum(server.makers.released.values()) == 1


async def test_a_clients_ticket_that_no_worker_reads_is_released_by_routing() -> None:
    server = KindsScene("prefill-a-vllm-0", "decode-a-vllm-0", "decode-a-motet-0")
    ticket = await ticket_of(server, "prefill-a-vllm-0")
    server.fleet.mark("decode-a-vllm-0", WorkerState.DRAINING)
    request = msgspec.structs.replace(of_a(), ticket=ticket)
    assert await answered(server, request) == await uninterrupted(of_a())
    await settle()
    assert [len(server.engines[name].released) for name in server.engines] == [0, 1, 0]


async def test_a_foreign_ticket_of_a_maker_that_was_restarted_is_not_read() -> None:
    server = KindsScene("prefill-a-vllm-0", "decode-a-vllm-0")
    ticket = await ticket_of(server, "prefill-a-vllm-0")
    server.start("prefill-a-vllm-0")
    await answered(server, msgspec.structs.replace(of_a(), ticket=ticket))
    await settle()
    assert server.engines["decode-a-vllm-0"].record.pulls == 0
    assert server.engines["decode-a-vllm-0"].released == [ticket]


async def test_a_foreign_ticket_is_released_by_a_reader_else_by_a_worker_of_its_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    server = KindsScene("decode-a-motet-0", "both-b-vllm-0", "prefill-a-vllm-0", "decode-a-vllm-0")
    fleet, engines = server.fleet, server.engines
    tickets = [await ticket_of(server, "prefill-a-vllm-0") for _ in range(3)]
    fleet.mark("decode-a-vllm-0", WorkerState.DRAINING)
    await server.router.release(tickets[0])
    assert engines["decode-a-vllm-0"].released == tickets[:1]
    fleet.mark("decode-a-vllm-0", WorkerState.DEAD)
    await server.router.release(tickets[1])
    assert engines["both-b-vllm-0"].released == tickets[1:2]
    fleet.mark("both-b-vllm-0", WorkerState.DEAD)
    fleet.mark("prefill-a-vllm-0", WorkerState.SILENT)
    await server.router.release(tickets[2])
    assert caplog.messages[-1] == "no worker can release the ticket of t: its lease expires"


async def test_a_ticket_that_no_worker_can_release_is_counted() -> None:
    server = KindsScene("prefill-a-vllm-0")
    ticket = await ticket_of(server, "prefill-a-vllm-0")
    server.fleet.mark("prefill-a-vllm-0", WorkerState.DEAD)
    tickets = TicketLog()
    await Router(server.fleet, tickets=tickets).release(ticket)
    assert tickets.tickets_unused == {"released": 0, "left": 1}


async def test_a_motet_ticket_is_released_by_its_maker_and_never_by_another_kind() -> None:
    server = KindsScene("decode-a-vllm-0", "decode-a-motet-0", "prefill-a-motet-0")
    first, second = [await ticket_of(server, "prefill-a-motet-0") for _ in range(2)]
    await server.router.release(first)
    assert server.engines["prefill-a-motet-0"].released == [first]
    server.fleet.mark("prefill-a-motet-0", WorkerState.SILENT)
    await server.router.release(second)
    assert server.engines["decode-a-motet-0"].released == [second]


@pytest.mark.parametrize(("kind", "parts", "spreads"), [("motet", 2, 1), ("vllm", 1, 0)])
async def test_a_group_whose_ticket_allows_one_reader_is_not_split(kind: str, parts: int, spreads: int) -> None:
    names = (f"prefill-a-{kind}-0", f"decode-a-{kind}-0", f"decode-a-{kind}-1")
    server = KindsScene(*names, spread_choices=4)
    request = of_a(n=8)
    assert await answered(server, request) == await uninterrupted(request)
    assert sum(len(engine.requests) for engine in server.engines.values()) == parts
    assert server.router.figures().spreads == spreads


async def test_a_group_that_is_not_prefilled_is_split_whatever_tickets_allow() -> None:
    server = KindsScene("decode-a-vllm-0", "decode-a-vllm-1", spread_choices=4)
    request = msgspec.structs.replace(of_a(n=8), prompt=(1, 2, 3, 4))
    await answered(server, request)
    assert generating(server) == ["decode-a-vllm-0", "decode-a-vllm-1"]


async def test_a_group_planned_in_parts_is_not_split_if_its_ticket_has_fewer_readers() -> None:
    """A Motet prefill worker died before it made the ticket, and a worker of another kind made it."""
    server = KindsScene("prefill-a-motet-0", "decode-a-motet-0", "decode-a-motet-1", spread_choices=4)
    controlled = ControlledPrefill()
    server.engines["prefill-a-motet-0"].during_prefill = controlled
    request = of_a(n=8)
    reading = asyncio.create_task(answered(server, request))
    await controlled.entered.wait()
    for name in ("prefill-a-vllm-0", "decode-a-vllm-0", "decode-a-vllm-1"):
        server.start(name)
    server.engines["prefill-a-motet-0"].die()
    controlled.may_end.set()
    await settle()
    assert await reading == await uninterrupted(request)
    assert (prefilled(server), len(server.engines)) == (["prefill-a-motet-0", "prefill-a-vllm-0"], 6)
    assert [len(server.engines[name].requests[0].choices) for name in generating(server)] == [8]
