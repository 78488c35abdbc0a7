"""The acknowledgement that decode has the KV of prefill is lost: decode continues, and the lease expires.

Cores, transfer threads and side channels are real. The transport is a fake, which loses messages on demand, and so is
the clock of the cores: a lease expires when the test says so, however slow the machine is.
"""

import select
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from motet.engines.native.build import build_parts
from motet.engines.native.core import EngineCore
from motet.ids import RequestId, new_engine_id
from motet.transfer.orders import ConnectWorker
from motet.transfer.proof import Proof
from motet.transfer.thread import TransferSettings, TransferThread
from motet.types import GenerateRequest, Role
from tests.clock import Clock
from tests.engines.native.drive import GroupOutcome, group, prompt_of, take_step
from tests.fault.worker_pair import undisturbed
from tests.patience import PATIENCE_S
from tests.tiny_engine import engine_config
from tests.transfer.local import LocalNetwork

LEASE_S = 60.0


@contextmanager
def core(folder: Path, role: Role, network: LocalNetwork, clock: Clock) -> Iterator[EngineCore]:
    parts = build_parts(engine_config(folder, role=role, lease_s=LEASE_S))
    proof = Proof(parts.info.num_blocks)
    memory = parts.storage.memory(proof)
    name = new_engine_id(role)
    settings = TransferSettings(host="127.0.0.1", port=0, cluster_key="", pull_timeout_s=PATIENCE_S, engine_id=name)
    transfers = TransferThread(
        settings, parts.facts, memory=memory, make_transport=lambda _: network.join(name, memory)
    )
    try:
        yield EngineCore(parts.info, parts.runner, options=parts.options, proof=proof, transfers=transfers, clock=clock)
    finally:
        transfers.close()


def connect(decode: EngineCore, prefill: EngineCore) -> None:
    """Connects the two as a cell does at its start. A worker that seems silent, because the machine was suspended, is
    tried again."""
    assert prefill.transfers is not None and decode.transfers is not None
    for number in range(5):
        decode.transfers.order(ConnectWorker(number, prefill.transfers.address))
        while not (connected := decode.step().connected):
            select.select([decode.transfers], [], [], PATIENCE_S)
        if connected[0].error is None:
            return
    pytest.fail("the workers cannot be connected")


def generated(decode: EngineCore, request: GenerateRequest) -> dict[int, list[int]]:
    """Takes steps until the group has finished, and returns its tokens. While the group waits for its transfer, this
    waits for the transfer thread, as the engine process does: a busy loop would take the interpreter lock from it."""
    outcomes = {"g": GroupOutcome()}
    assert decode.transfers is not None
    decode.submit(request)
    while decode.busy:
        take_step(decode, outcomes)
        if decode.stats().groups_waiting:
            select.select([decode.transfers], [], [], PATIENCE_S)
    return outcomes["g"].tokens


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1], ids=["acknowledged", "lost"])
def test_a_lost_acknowledgement_costs_only_the_time_of_a_lease(lost: int, folder: Path) -> None:
    network, request, clock = LocalNetwork(), group("g", prompt_of(200), n=3, seed=4), Clock()
    with core(folder, Role.PREFILL, network, clock) as prefill, core(folder, Role.DECODE, network, clock) as decode:
        connect(decode, prefill)
        prefill.prefill(request)
        ticket = prefill.step().tickets[RequestId("g")]
        network.lose_messages(lost)
        assert generated(decode, msgspec.structs.replace(request, ticket=ticket)) == undisturbed(folder, request)
        assert decode.stats().transfers == 1
        assert prefill.transfers is not None
        while prefill.stats().leases:
            if lost:
                clock.now_s += LEASE_S  # again if an earlier heartbeat, which is read now, extends the lease
            else:
                select.select([prefill.transfers], [], [], PATIENCE_S)
            prefill.step()
        prefill.check()
        assert prefill.stats().leases_expired == lost
        assert prefill.stats().blocks_used == 0
