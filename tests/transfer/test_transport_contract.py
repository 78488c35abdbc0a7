"""The contract of `Transport`, for the transport inside a process, shared memory, and NIXL."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from motet.transfer.orders import FailureKind, TransferError
from motet.transfer.transport import BlockRun, ReadState
from tests.transfer.memory import EVERY_TRANSPORT, KVMemory, Side, failing, finish, poll_until, read_proof

pytestmark = pytest.mark.slow

NUM_BLOCKS = 24
starts = itertools.count()


LONG = {"nixl over tcp": (pytest.mark.long,)}
"""Processes use it in `test_transport_processes`, and threads in `test_thread_transports`."""


@pytest.fixture(scope="module", params=[pytest.param(name, marks=LONG.get(name, ())) for name in EVERY_TRANSPORT])
def start(request: pytest.FixtureRequest) -> Iterator[Callable[[KVMemory], Side]]:
    """Returns a function that starts a worker."""
    make, sides = EVERY_TRANSPORT[request.param](), list[Side]()

    def start_one(kv: KVMemory) -> Side:
        sides.append(Side(make(f"contract-{next(starts)}", kv.memory), kv))
        return sides[-1]

    yield start_one
    for side in sides:
        side.transport.close()


@dataclass
class Pair:
    """Two connected workers, shared by tests that do not disconnect or close them."""

    reader: Side
    owner: Side
    owner_name: str
    reader_name: str


@pytest.fixture(scope="module")
def pair(start: Callable[[KVMemory], Side]) -> Pair:
    reader, owner = start(KVMemory()), start(KVMemory())
    return Pair(reader, owner, reader.connect(owner), owner.connect(reader))


@st.composite
def block_pairs(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Generates (remote, local) blocks, each at most once and often neighbours."""
    count = draw(st.integers(1, NUM_BLOCKS))
    numbers = st.permutations(range(NUM_BLOCKS))
    remote = draw(st.one_of(st.just(list(range(NUM_BLOCKS))), numbers))
    local = draw(st.one_of(st.just(remote), numbers))
    return list(zip(remote[:count], local[:count], strict=True))


@examples(max_examples=40)
@given(pairs=block_pairs(), seed=st.integers(0, 2**32 - 1))
def test_bytes_arrive_exactly_and_nothing_else_changes(pair: Pair, pairs: list[tuple[int, int]], seed: int) -> None:
    pair.owner.kv.fill(seed)
    pair.reader.kv.fill(seed + 1)
    before, owners = pair.reader.kv.copy(), pair.owner.kv.copy()
    assert finish(pair.reader.read(pair.owner_name, pairs), pair.reader, pair.owner) is ReadState.DONE
    pair.reader.kv.expect(before, pair.owner.kv, pairs)
    pair.owner.kv.expect(owners, pair.owner.kv, [])


def test_several_reads_run_at_once(pair: Pair) -> None:
    before = pair.reader.kv.copy()
    pairs = [(block, NUM_BLOCKS - 1 - block) for block in range(NUM_BLOCKS)]
    reads = [pair.reader.read(pair.owner_name, [one]) for one in pairs]
    for read in reversed(reads):
        assert finish(read, pair.reader, pair.owner) is ReadState.DONE
    pair.reader.kv.expect(before, pair.owner.kv, pairs)


def test_both_sides_read_from_each_other_at_once(pair: Pair) -> None:
    readers, owners = pair.reader.kv.copy(), pair.owner.kv.copy()
    there, back = [(block, block) for block in range(8)], [(block, block) for block in range(8, 16)]
    reads = pair.reader.read(pair.owner_name, there), pair.owner.read(pair.reader_name, back)
    assert [finish(read, pair.reader, pair.owner) for read in reads] == [ReadState.DONE] * 2
    pair.reader.kv.expect(readers, pair.owner.kv, there)
    pair.owner.kv.expect(owners, pair.reader.kv, back)


def test_a_read_reports_its_number_of_bytes_and_descriptors(pair: Pair) -> None:
    read = pair.reader.transport.read_blocks(pair.owner_name, [BlockRun(0, 4, 3), BlockRun(9, 1, 1)])
    finish(read, pair.reader, pair.owner)
    assert read.num_bytes == 4 * pair.owner.kv.blocks[:, 0].size
    assert read.num_descriptors == 2 * len(pair.owner.kv.memory.regions)


@examples(max_examples=40)
@given(data=st.data())
def test_entries_of_a_proof_come_in_the_requested_order(pair: Pair, data: st.DataObject) -> None:
    proof = pair.owner.kv.proof
    reused = data.draw(st.lists(st.integers(0, NUM_BLOCKS - 1)))
    proof.increment_generations(reused)
    slot, digest = proof.allocate_slot(), data.draw(st.integers(1, 2**63 - 1))
    proof.publish(slot, digest)
    blocks = data.draw(st.lists(st.integers(0, NUM_BLOCKS - 1)))
    entries = data.draw(st.permutations([*blocks, NUM_BLOCKS + slot]))
    values = read_proof(pair.reader, pair.owner_name, entries, pair.reader, pair.owner)
    proof.free_slot(slot)
    generations = dict(zip(blocks, proof.generations(blocks), strict=True))
    assert values == [generations.get(entry, digest) for entry in entries]


def test_several_proofs_are_read_at_once(pair: Pair) -> None:
    proof = pair.owner.kv.proof
    proof.increment_generations([1, 1, 2])
    reads = [pair.reader.transport.read_proof(pair.owner_name, [block]) for block in (2, 1, 0)]
    assert [finish(read, pair.reader, pair.owner) for read, _ in reads] == [ReadState.DONE] * 3
    assert [values for _, values in reads] == [[generation] for generation in proof.generations([2, 1, 0])]


def test_a_read_returns_the_current_values_of_the_proof(pair: Pair) -> None:
    before = read_proof(pair.reader, pair.owner_name, [5], pair.reader, pair.owner)
    pair.owner.kv.proof.increment_generations([5])
    assert read_proof(pair.reader, pair.owner_name, [5], pair.reader, pair.owner) == [before[0] + 1]


def test_messages_arrive_once_and_in_order(pair: Pair) -> None:
    messages = [b"first", b"", b"x" * 20_000, b"last"]
    for message in messages:
        pair.reader.transport.notify(pair.owner_name, message)
    pair.owner.transport.notify(pair.reader_name, b"back")
    poll_until(lambda: len(pair.owner.inbox) >= 4 and len(pair.reader.inbox) >= 1, pair.reader, pair.owner)
    for side in (pair.reader, pair.owner):
        side.poll()
    assert (pair.owner.inbox, pair.reader.inbox) == (messages, [b"back"])
    pair.owner.inbox, pair.reader.inbox = [], []


def test_a_worker_that_was_never_connected_cannot_be_read(pair: Pair) -> None:
    with pytest.raises(TransferError) as blocks:
        pair.reader.read("unknown", [(0, 0)])
    with pytest.raises(TransferError) as proof:
        pair.reader.transport.read_proof("unknown", [0])
    pair.reader.transport.notify("unknown", b"lost")
    pair.reader.transport.disconnect("unknown")
    assert (blocks.value.kind, proof.value.kind) == (FailureKind.PEER_LOST, FailureKind.PEER_LOST)


@pytest.mark.parametrize(
    "run",
    [
        BlockRun(NUM_BLOCKS, 0, 1),
        BlockRun(0, NUM_BLOCKS, 1),
        BlockRun(NUM_BLOCKS - 1, 0, 2),
        BlockRun(-1, 0, 1),
        BlockRun(0, 0, 0),
    ],
)
def test_blocks_that_do_not_exist_are_refused(pair: Pair, run: BlockRun) -> None:
    before = pair.reader.kv.copy()
    with failing(FailureKind.REFUSED):
        pair.reader.transport.read_blocks(pair.owner_name, [BlockRun(0, 0, 1), run])
    pair.reader.kv.expect(before, pair.owner.kv, [])


@pytest.mark.parametrize("entries", [[-1], [0, 2**40], []])
def test_entries_that_do_not_exist_are_refused(pair: Pair, entries: list[int]) -> None:
    with failing(FailureKind.REFUSED):
        pair.reader.transport.read_proof(pair.owner_name, entries)


@pytest.mark.parametrize("description", [b"", b"garbage", b"\xff\x00" * 100])
def test_an_invalid_description_is_refused(pair: Pair, description: bytes) -> None:
    with failing(FailureKind.REFUSED):
        pair.reader.transport.connect(description, pair.owner.kv.memory)


def test_a_worker_does_not_connect_to_itself(pair: Pair) -> None:
    with failing(FailureKind.REFUSED):
        pair.reader.connect(pair.reader)


def test_blocks_of_another_shape_are_refused_with_both_sides_shown(pair: Pair) -> None:
    other = KVMemory(num_regions=2, block_bytes=128)
    with pytest.raises(TransferError, match=r"\(3, 96\) here and \(2, 128\) there") as refused:
        pair.reader.transport.connect(pair.owner.transport.describe(), other.memory)
    assert refused.value.kind is FailureKind.REFUSED


def test_connecting_again_changes_nothing(pair: Pair) -> None:
    read = pair.reader.read(pair.owner_name, [(3, 3)])
    assert pair.reader.connect(pair.owner) == pair.owner_name
    assert finish(read, pair.reader, pair.owner) is ReadState.DONE


def test_a_disconnected_worker_cannot_be_read_until_it_is_connected_again(start: Callable[[KVMemory], Side]) -> None:
    reader, owner = start(KVMemory(seed=1)), start(KVMemory(seed=2))
    before, name = reader.kv.copy(), reader.connect(owner)
    assert finish(reader.read(name, [(0, 1)]), reader, owner) is ReadState.DONE
    reader.transport.disconnect(name)
    reader.transport.disconnect(name)
    with failing(FailureKind.PEER_LOST):
        reader.read(name, [(0, 0)])
    assert reader.connect(owner) == name
    assert finish(reader.read(name, [(2, 3)]), reader, owner) is ReadState.DONE
    reader.kv.expect(before, owner.kv, [(0, 1), (2, 3)])


def test_running_reads_end_normally_after_a_disconnect(start: Callable[[KVMemory], Side]) -> None:
    reader, owner = start(KVMemory(seed=1, block_bytes=2**18)), start(KVMemory(seed=2, block_bytes=2**18))
    before, name = reader.kv.copy(), reader.connect(owner)
    pairs = [(block, block) for block in range(NUM_BLOCKS)]
    read = reader.read(name, pairs)
    reader.transport.disconnect(name)
    assert finish(read, reader, owner) is ReadState.DONE
    reader.kv.expect(before, owner.kv, pairs)


def test_a_restarted_worker_is_connected_under_its_new_name(start: Callable[[KVMemory], Side]) -> None:
    reader, owner = start(KVMemory(seed=1)), start(KVMemory(seed=2))
    before, old_name = reader.kv.copy(), reader.connect(owner)
    assert finish(reader.read(old_name, [(0, 1)]), reader, owner) is ReadState.DONE
    owner.transport.close()
    again = start(owner.kv)
    new_name = reader.connect(again)
    assert new_name != old_name
    reader.transport.disconnect(old_name)
    assert finish(reader.read(new_name, [(2, 3)]), reader, again) is ReadState.DONE
    reader.kv.expect(before, again.kv, [(0, 1), (2, 3)])


def test_memory_that_is_registered_again_is_read_with_its_new_content(start: Callable[[KVMemory], Side]) -> None:
    """Reads by a peer that was connected before, by a peer that connects again, and by a new peer."""
    reader, owner, other = start(KVMemory(seed=1)), start(KVMemory(seed=2)), start(KVMemory(seed=3))
    name, back = reader.connect(owner), owner.connect(reader)
    assert finish(reader.read(name, [(0, 1)]), reader, owner) is ReadState.DONE
    for side in (reader, owner):
        assert side.transport.deregister_blocks() and side.transport.deregister_blocks()
        side.kv.fill(9)
        side.transport.register_blocks()
        side.transport.register_blocks()
    owner.kv.fill(10)
    before, owners, others = reader.kv.copy(), owner.kv.copy(), other.kv.copy()
    assert finish(reader.read(name, [(2, 3)]), reader, owner) is ReadState.DONE
    assert reader.connect(owner) == name
    assert finish(reader.read(name, [(4, 5)]), reader, owner) is ReadState.DONE
    reader.kv.expect(before, owner.kv, [(2, 3), (4, 5)])
    assert finish(other.read(other.connect(owner), [(6, 7)]), other, owner) is ReadState.DONE
    other.kv.expect(others, owner.kv, [(6, 7)])
    assert finish(owner.read(back, [(3, 8)]), owner, reader) is ReadState.DONE
    owner.kv.expect(owners, reader.kv, [(3, 8)])


def test_a_closed_transport_refuses_every_call(start: Callable[[KVMemory], Side]) -> None:
    reader, owner = start(KVMemory()), start(KVMemory())
    name = reader.connect(owner)
    read = reader.read(name, [(0, 0)])
    reader.transport.close()
    reader.transport.close()
    assert read.poll() is not ReadState.RUNNING, "no bytes can arrive once the transport is closed"
    read.close()
    reader.transport.notify(name, b"lost")
    for act in (lambda: reader.connect(owner), lambda: reader.read(name, [(0, 0)]), reader.poll):
        with pytest.raises(TransferError) as closed:
            act()
        assert closed.value.kind in (FailureKind.CLOSED, FailureKind.PEER_LOST)
