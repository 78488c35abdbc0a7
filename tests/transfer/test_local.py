"""The local network stops, resumes and disconnects workers, and loses messages, on demand."""

import pytest

from motet.transfer.orders import FailureKind
from motet.transfer.transport import ReadState
from tests.transfer.local import LocalNetwork
from tests.transfer.memory import KVMemory, Side, failing


@pytest.fixture
def network() -> LocalNetwork:
    return LocalNetwork()


@pytest.fixture
def reader(network: LocalNetwork) -> Side:
    kv = KVMemory(seed=1)
    return Side(network.join("reader", kv.memory), kv)


@pytest.fixture
def owner(network: LocalNetwork) -> Side:
    kv = KVMemory(seed=2)
    return Side(network.join("owner", kv.memory), kv)


def test_nothing_is_copied_before_the_reader_polls(reader: Side, owner: Side) -> None:
    before = reader.kv.copy()
    reader.read(reader.connect(owner), [(0, 5)])
    reader.kv.expect(before, owner.kv, [])
    reader.poll()
    reader.kv.expect(before, owner.kv, [(0, 5)])


def test_a_read_from_a_stopped_worker_runs_and_lands_when_the_worker_resumes(
    network: LocalNetwork, reader: Side, owner: Side
) -> None:
    before = reader.kv.copy()
    read = reader.read(reader.connect(owner), [(0, 5)])
    proof, values = reader.transport.read_proof("owner", [3])
    network.stop("owner")
    reader.transport.disconnect("owner")
    reader.poll()
    assert (read.poll(), proof.poll()) == (ReadState.RUNNING, ReadState.RUNNING)
    with pytest.raises(RuntimeError, match="can still arrive"):
        read.close()
    reader.kv.expect(before, owner.kv, [])
    network.resume("owner")
    assert (read.poll(), proof.poll()) == (ReadState.DONE, ReadState.DONE)
    reader.kv.expect(before, owner.kv, [(0, 5)])
    assert tuple(values) == owner.kv.proof.generations([3])


@pytest.mark.parametrize("stopped", [False, True])
def test_a_read_from_a_worker_that_dies_fails_and_never_lands(
    network: LocalNetwork, reader: Side, owner: Side, stopped: bool
) -> None:
    before = reader.kv.copy()
    read = reader.read(reader.connect(owner), [(0, 5)])
    if stopped:
        network.stop("owner")
    network.cut("owner")
    assert read.poll() is ReadState.FAILED
    network.resume("owner")
    assert read.poll() is ReadState.FAILED
    reader.kv.expect(before, owner.kv, [])
    with failing(FailureKind.PEER_LOST):
        reader.read("owner", [(0, 5)])


def test_the_network_loses_the_requested_number_of_messages(network: LocalNetwork, reader: Side, owner: Side) -> None:
    name = reader.connect(owner)
    network.lose_messages(2)
    for message in (b"1", b"2", b"3"):
        reader.transport.notify(name, message)
    owner.poll()
    assert owner.inbox == [b"3"]


def test_a_name_cannot_be_used_twice(network: LocalNetwork, owner: Side) -> None:
    owner.transport.close()
    with pytest.raises(ValueError, match="owner has joined before"):
        network.join("owner", owner.kv.memory)
