"""NIXL between processes that die, stop and go on. That blocks have one owner depends on these facts."""

import itertools
import signal
import time
from collections.abc import Iterator

import pytest

from motet.transfer.nixl import NixlTransport
from motet.transfer.orders import FailureKind, TransferError
from motet.transfer.transport import PostedRead, ReadState
from tests.forked import ForkingProcess
from tests.transfer.memory import SHARED_MEMORY, TCP, KVMemory, Side, attend_until, failing, finish
from tests.transfer.nixl_worker import Order, WorkerProcess, worker_process

pytestmark = pytest.mark.slow

BLOCK_BYTES = 2**20
OWNERS_SEED, READERS_SEED = 1, 2  # of noise whose first bytes differ
ALL = [(block, block) for block in range(24)]
starts = itertools.count()


def order(ucx: dict[str, str]) -> Order:
    return Order(name=f"owner-{next(starts)}", ucx=ucx, block_bytes=BLOCK_BYTES, seed=OWNERS_SEED)


@pytest.fixture
def theirs() -> KVMemory:
    """The memory that every owner has."""
    return KVMemory(block_bytes=BLOCK_BYTES, seed=OWNERS_SEED)


@pytest.fixture
def owner(forking: ForkingProcess) -> Iterator[WorkerProcess]:
    """A worker that is reached over TCP."""
    with worker_process(forking, order(TCP)) as process:
        yield process


@pytest.fixture
def reader() -> Iterator[Side]:
    with_memory = side(TCP)
    yield with_memory
    with_memory.transport.close()


def side(ucx: dict[str, str]) -> Side:
    kv = KVMemory(block_bytes=BLOCK_BYTES, seed=READERS_SEED)
    return Side(NixlTransport(f"reader-{next(starts)}", kv.memory, ucx=ucx), kv)


def met(reader: Side, owner: WorkerProcess) -> str:
    """Connects the reader, waits for its first read, and returns the owner's name."""
    name = reader.transport.connect(owner.introduction.description, owner.introduction.memory)
    read, _ = reader.transport.read_proof(name, [0])
    assert finish(read, reader) is ReadState.DONE
    return name


def half_read(reader: Side, owner: WorkerProcess, name: str) -> PostedRead:
    """Returns a read of which only a part has landed: the rest cannot, as the owner is stopped.

    All 72 MB may come before we notice the first byte; then they are read again.
    """
    noise = reader.kv.blocks[0, 0, 0]
    for _ in range(20):
        read = reader.read(name, ALL)
        attend_until(lambda: reader.kv.blocks[0, 0, 0] != noise, reader)
        owner.signal(signal.SIGSTOP)
        attend_for(0.1, reader)
        if read.poll() is ReadState.RUNNING:
            return read
        read.close()
        owner.signal(signal.SIGCONT)
        reader.kv.fill(READERS_SEED)
    pytest.fail("every read was over before its owner could be stopped")


def attend_for(seconds: float, side: Side) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        side.attend()


@pytest.mark.parametrize("ucx", [SHARED_MEMORY, TCP], ids=["shared memory", "tcp"])
def test_blocks_come_from_another_process(forking: ForkingProcess, ucx: dict[str, str], theirs: KVMemory) -> None:
    reader = side(ucx)
    before = reader.kv.copy()
    with worker_process(forking, order(ucx)) as owner:
        read = reader.read(met(reader, owner), ALL[3:20])
        assert finish(read, reader) is ReadState.DONE
        reader.transport.close()
    reader.kv.expect(before, theirs, ALL[3:20])


def test_a_read_from_a_worker_that_is_killed_fails_and_nothing_is_written_after(
    owner: WorkerProcess, reader: Side
) -> None:
    name = met(reader, owner)
    read = half_read(reader, owner, name)
    owner.signal(signal.SIGKILL)
    assert finish(read, reader) is ReadState.FAILED
    then = reader.kv.copy()
    attend_for(0.5, reader)
    reader.kv.expect(then, reader.kv, [])
    with failing(FailureKind.PEER_LOST):
        reader.read(name, ALL)


@pytest.mark.parametrize("ucx", [SHARED_MEMORY, TCP], ids=["shared memory", "tcp"])
def test_a_worker_that_was_killed_before_the_read_is_lost(forking: ForkingProcess, ucx: dict[str, str]) -> None:
    reader = side(ucx)
    with worker_process(forking, order(ucx)) as owner:
        name = met(reader, owner)
        owner.signal(signal.SIGKILL)
        owner.wait()
        before = reader.kv.copy()
        try:
            state = finish(reader.read(name, ALL), reader)
        except TransferError as error:
            assert error.kind is FailureKind.PEER_LOST
        else:
            assert state is ReadState.FAILED
        reader.kv.expect(before, reader.kv, [])
    reader.transport.close()


def test_a_read_from_a_stopped_worker_lands_when_the_worker_continues(
    owner: WorkerProcess, reader: Side, theirs: KVMemory
) -> None:
    name, before = met(reader, owner), reader.kv.copy()
    owner.signal(signal.SIGSTOP)
    read = reader.read(name, ALL)
    reader.transport.disconnect(name)
    attend_for(1.0, reader)
    assert read.poll() is ReadState.RUNNING
    with pytest.raises(RuntimeError, match="may still write"):
        read.close()
    owner.signal(signal.SIGCONT)
    assert finish(read, reader) is ReadState.DONE
    reader.kv.expect(before, theirs, ALL)


def test_after_close_nothing_is_written_even_if_a_stopped_worker_goes_on(owner: WorkerProcess, reader: Side) -> None:
    name = met(reader, owner)
    read = reader.read(name, ALL)
    attend_for(0.005, reader)
    owner.signal(signal.SIGSTOP)
    attend_for(0.1, reader)
    reader.transport.close()
    assert read.poll() is not ReadState.RUNNING
    then = reader.kv.copy()
    owner.signal(signal.SIGCONT)
    time.sleep(0.5)  # not for order: the time in which nothing may happen
    reader.kv.expect(then, reader.kv, [])


def test_a_worker_outlives_a_reader_that_is_killed_while_bytes_land(
    forking: ForkingProcess, owner: WorkerProcess, reader: Side, theirs: KVMemory
) -> None:
    name, before = met(reader, owner), reader.kv.copy()
    with worker_process(forking, Order("victim", TCP, BLOCK_BYTES, seed=3)) as victim:
        victim.tell(owner.introduction)
        assert victim.line() == "landing"
        victim.signal(signal.SIGKILL)
        victim.wait()
    assert finish(reader.read(name, ALL), reader) is ReadState.DONE
    reader.kv.expect(before, theirs, ALL)
    reader.transport.notify(name, b"still there")
    assert owner.line() == "still there"


def test_a_worker_that_comes_back_is_read_under_its_new_name(
    forking: ForkingProcess, reader: Side, theirs: KVMemory
) -> None:
    with worker_process(forking, order(TCP)) as first:
        old_name = met(reader, first)
        read = half_read(reader, first, old_name)
        first.signal(signal.SIGKILL)
        assert finish(read, reader) is ReadState.FAILED
    before = reader.kv.copy()
    with worker_process(forking, order(TCP)) as second:
        new_name = met(reader, second)
        reader.transport.disconnect(old_name)
        assert finish(reader.read(new_name, ALL), reader) is ReadState.DONE
    reader.kv.expect(before, theirs, ALL)
