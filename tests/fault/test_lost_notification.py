"""The acknowledgement that decode has the KV of prefill gets lost: decode continues, and the lease expires.

Cores, transfer threads and side channels are real. Only the transport is a fake, which loses messages on demand.
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
from tests.engines.native.drive import GroupOutcome, group, prompt_of, take_step
from tests.fault.worker_pair import undisturbed
from tests.tiny_engine import engine_config
from tests.transfer.local import LocalNetwork

LEASE_S = 0.5


@contextmanager
def core(folder: Path, role: Role, network: LocalNetwork) -> Iterator[EngineCore]:
    parts = build_parts(engine_config(folder, role=role, lease_s=LEASE_S))
    proof = Proof(parts.info.num_blocks)
    memory = parts.storage.memory(proof)
    name = new_engine_id(role)
    settings = TransferSettings(host="127.0.0.1", port=0, cluster_key="", pull_timeout_s=5.0, engine_id=name)
    transfers = TransferThread(settings, parts.facts, memory=memory, make_transport=lambda: network.join(name, memory))
    try:
        yield EngineCore(parts.info, parts.runner, options=parts.options, proof=proof, transfers=transfers)
    finally:
        transfers.close()


def meet(decode: EngineCore, prefill: EngineCore) -> None:
    """Connects the two as a cell does at its start. It tries again if the machine was suspended until a worker seemed
    silent."""
    assert prefill.transfers is not None and decode.transfers is not None
    for number in range(5):
        decode.transfers.order(ConnectWorker(number, prefill.transfers.address))
        while not (met := decode.step().met):
            select.select([decode.transfers], [], [], LEASE_S)
        if met[0].error is None:
            return
    pytest.fail("the two never met")


def generated(decode: EngineCore, request: GenerateRequest) -> dict[int, list[int]]:
    """Takes steps until the group has finished. Like the engine's process it sleeps while it waits only for a transfer:
    a loop without sleep would keep the interpreter from the thread for which it waits."""
    outcomes = {"g": GroupOutcome()}
    assert decode.transfers is not None
    decode.submit(request)
    while decode.busy:
        take_step(decode, outcomes)
        if decode.stats().groups_waiting:
            select.select([decode.transfers], [], [], LEASE_S)
    return outcomes["g"].tokens


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1], ids=["acknowledged", "lost"])
def test_a_lost_acknowledgement_costs_only_the_time_of_a_lease(lost: int, folder: Path) -> None:
    network, request = LocalNetwork(), group("g", prompt_of(200), n=3, seed=4)
    with core(folder, Role.PREFILL, network) as prefill, core(folder, Role.DECODE, network) as decode:
        meet(decode, prefill)
        prefill.prefill(request)
        ticket = prefill.step().tickets[RequestId("g")]
        network.lose_messages(lost)
        assert generated(decode, msgspec.structs.replace(request, ticket=ticket)) == undisturbed(folder, request)
        assert decode.stats().transfers == 1
        assert prefill.transfers is not None
        while prefill.stats().leases:
            select.select([prefill.transfers], [], [], LEASE_S / 10)
            prefill.step()
        prefill.check()
        assert prefill.stats().leases_expired == lost
        assert prefill.stats().blocks_used == 0
