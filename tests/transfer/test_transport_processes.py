"""Transports between processes that are killed, stopped and resumed. The rule that a pull owns its destination blocks
depends on the facts tested here."""

import itertools
import signal
import time
from collections.abc import Iterator

import pytest

from motet.transfer.orders import FailureKind, TransferError
from motet.transfer.transport import PostedRead, ReadState
from tests.forked import ForkingProcess
from tests.transfer.memory import EVERY_TRANSPORT, KVMemory, Side, failing, finish, poll_until
from tests.transfer.worker_process import WorkerProcess, WorkerSettings, worker_process

pytestmark = pytest.mark.slow

BLOCK_BYTES = 2**20
OWNERS_SEED, READERS_SEED = 1, 2  # the first random bytes of the two differ
ALL = [(block, block) for block in range(24)]
starts = itertools.count()


def settings(transport: str) -> WorkerSettings:
    return WorkerSettings(f"owner-{next(starts)}", transport, BLOCK_BYTES, seed=OWNERS_SEED)


@pytest.fixture
def owners_memory() -> KVMemory:
    """Memory with the same content as every owner's memory."""
    return KVMemory(block_bytes=BLOCK_BYTES, seed=OWNERS_SEED)


@pytest.fixture(params=["shared memory", "nixl over tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    """A transport whose reads take time: with NIXL over shared memory a read is final at once."""
    return str(request.param)


@pytest.fixture
def owner(forking: ForkingProcess, transport: str) -> Iterator[WorkerProcess]:
    with worker_process(forking, settings(transport)) as process:
        yield process


@pytest.fixture
def reader(transport: str) -> Iterator[Side]:
    with_memory = side(transport)
    yield with_memory
    with_memory.transport.close()


def side(transport: str) -> Side:
    kv = KVMemory(block_bytes=BLOCK_BYTES, seed=READERS_SEED)
    return Side(EVERY_TRANSPORT[transport]()(f"reader-{next(starts)}", kv.memory), kv)


def connect(reader: Side, owner: WorkerProcess) -> str:
    """Connects the reader, waits for its first read, and returns the owner's name."""
    name = reader.transport.connect(owner.description.description, owner.description.memory)
    read, _ = reader.transport.read_proof(name, [0])
    assert finish(read, reader) is ReadState.DONE
    return name


def half_read(reader: Side, owner: WorkerProcess, name: str) -> PostedRead:
    """Returns a read whose bytes have arrived only in part: the rest cannot, because the owner is stopped.

    All 72 MB can arrive before this function notices the first byte; it then reads them again.
    """
    noise = reader.kv.blocks[0, 0, 0]
    for _ in range(20):
        read = reader.read(name, ALL)
        poll_until(lambda: reader.kv.blocks[0, 0, 0] != noise, reader)
        owner.signal(signal.SIGSTOP)
        poll_for(0.1, reader)
        if read.poll() is ReadState.RUNNING:
            return read
        read.close()
        owner.signal(signal.SIGCONT)
        reader.kv.fill(READERS_SEED)
    pytest.fail("every read was final before its owner could be stopped")


def poll_for(seconds: float, side: Side) -> None:
    """Polls for this CPU time, since a busy machine leaves little of the real time to this thread."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        side.poll()


@pytest.mark.parametrize("transport", ["shared memory", "nixl", "nixl over tcp"])
def test_blocks_come_from_another_process(forking: ForkingProcess, transport: str, owners_memory: KVMemory) -> None:
    reader = side(transport)
    before = reader.kv.copy()
    with worker_process(forking, settings(transport)) as owner:
        read = reader.read(connect(reader, owner), ALL[3:20])
        assert finish(read, reader) is ReadState.DONE
        reader.transport.close()
    reader.kv.expect(before, owners_memory, ALL[3:20])


def test_a_read_from_a_worker_that_is_killed_fails_and_no_bytes_arrive_afterwards(
    owner: WorkerProcess, reader: Side
) -> None:
    name = connect(reader, owner)
    read = half_read(reader, owner, name)
    owner.signal(signal.SIGKILL)
    assert finish(read, reader) is ReadState.FAILED
    then = reader.kv.copy()
    poll_for(0.5, reader)
    reader.kv.expect(then, reader.kv, [])
    with failing(FailureKind.PEER_LOST):
        reader.read(name, ALL)


@pytest.mark.parametrize("transport", ["shared memory", "nixl", "nixl over tcp"])
def test_a_worker_that_was_killed_before_the_read_is_lost(forking: ForkingProcess, transport: str) -> None:
    reader = side(transport)
    with worker_process(forking, settings(transport)) as owner:
        name = connect(reader, owner)
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
    owner: WorkerProcess, reader: Side, owners_memory: KVMemory
) -> None:
    name, before = connect(reader, owner), reader.kv.copy()
    owner.signal(signal.SIGSTOP)
    read = reader.read(name, ALL)
    reader.transport.disconnect(name)
    poll_for(1.0, reader)
    assert read.poll() is ReadState.RUNNING
    with pytest.raises(RuntimeError, match="can still arrive"):
        read.close()
    owner.signal(signal.SIGCONT)
    assert finish(read, reader) is ReadState.DONE
    reader.kv.expect(before, owners_memory, ALL)


def test_after_close_no_bytes_arrive_even_if_a_stopped_worker_resumes(owner: WorkerProcess, reader: Side) -> None:
    name = connect(reader, owner)
    read = reader.read(name, ALL)
    poll_for(0.005, reader)
    owner.signal(signal.SIGSTOP)
    poll_for(0.1, reader)
    reader.transport.close()
    assert read.poll() is not ReadState.RUNNING
    then = reader.kv.copy()
    owner.signal(signal.SIGCONT)
    time.sleep(0.5)  # not for synchronisation: no bytes may arrive during this time
    reader.kv.expect(then, reader.kv, [])


def test_a_worker_survives_the_kill_of_a_reader_while_bytes_arrive(
    forking: ForkingProcess, owner: WorkerProcess, reader: Side, owners_memory: KVMemory, transport: str
) -> None:
    name, before = connect(reader, owner), reader.kv.copy()
    with worker_process(forking, WorkerSettings("victim", transport, BLOCK_BYTES, seed=3)) as victim:
        victim.read_from(owner.description)
        assert victim.line() == "arriving"
        victim.signal(signal.SIGKILL)
        victim.wait()
    assert finish(reader.read(name, ALL), reader) is ReadState.DONE
    reader.kv.expect(before, owners_memory, ALL)
    reader.transport.notify(name, b"still there")
    assert owner.line() == "still there"


def test_a_restarted_worker_is_read_under_its_new_name(
    forking: ForkingProcess, reader: Side, owners_memory: KVMemory, transport: str
) -> None:
    with worker_process(forking, settings(transport)) as first:
        old_name = connect(reader, first)
        read = half_read(reader, first, old_name)
        first.signal(signal.SIGKILL)
        assert finish(read, reader) is ReadState.FAILED
    before = reader.kv.copy()
    with worker_process(forking, settings(transport)) as second:
        new_name = connect(reader, second)
        reader.transport.disconnect(old_name)
        assert finish(reader.read(new_name, ALL), reader) is ReadState.DONE
    reader.kv.expect(before, owners_memory, ALL)
