"""Shared memory between workers: other users are refused, nothing is left behind, and an idle worker costs nothing."""

import ctypes
import itertools
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from motet.errors import StartupError
from motet.transfer.backends import shared_segment
from motet.transfer.backends.shared_connection import (
    LENGTH_BYTES,
    MAX_FIRST_FRAME_BYTES,
    Notification,
    Open,
    Opened,
    ReaderFrame,
    ReadRequest,
    Taken,
    seal_of,
)
from motet.transfer.backends.shared_memory import LOOPBACK, MAX_UNPROVED, Description, SharedMemoryTransport
from motet.transfer.backends.shared_segment import (
    NUM_SLOTS,
    PREFIX,
    SEGMENT_BYTES,
    SLOT_BYTES,
    SharedSegment,
    remove_abandoned,
)
from motet.transfer.orders import FailureKind
from motet.transfer.transport import ReadState
from tests.patience import PATIENCE_S
from tests.transfer.memory import KVMemory, Side, failing, finish, poll_until

starts = itertools.count()
NONCE = b"n" * 16

KILLED_READER = """
import os, pathlib, signal, sys
from motet.transfer.backends import shared_segment
shared_segment.MEMORY_FOLDER = pathlib.Path(sys.argv[1])
segment = shared_segment.SharedSegment.create()
print(segment.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def segments() -> set[str]:
    """Returns the names of the files that segments have now."""
    return {path.name for path in shared_segment.MEMORY_FOLDER.iterdir()}


@pytest.fixture(autouse=True)
def memory_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the segments of a test, which must leave no file and no descriptor."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(shared_segment, "MEMORY_FOLDER", folder)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    descriptors = psutil.Process().num_fds()
    yield folder
    assert list(folder.iterdir()) == []
    assert psutil.Process().num_fds() <= descriptors


def a_side(*, seed: int = 0, block_bytes: int = 96) -> Side:
    kv = KVMemory(seed=seed, block_bytes=block_bytes)
    return Side(SharedMemoryTransport(f"worker-{next(starts)}", kv.memory), kv)


@pytest.fixture
def block_bytes(request: pytest.FixtureRequest) -> int:
    return int(getattr(request, "param", 96))


@pytest.fixture
def owner(block_bytes: int) -> Iterator[Side]:
    side = a_side(seed=1, block_bytes=block_bytes)
    yield side
    side.transport.close()


@pytest.fixture
def reader(block_bytes: int) -> Iterator[Side]:
    side = a_side(seed=2, block_bytes=block_bytes)
    yield side
    side.transport.close()


def description(side: Side) -> Description:
    return msgspec.msgpack.decode(side.transport.describe(), type=Description)


class Stranger:
    """A process that connects to an owner without being one of its readers."""

    def __init__(self, owner: Side) -> None:
        self._owner = owner
        self.socket = socket.create_connection((LOOPBACK, description(owner).port), PATIENCE_S)

    def send(self, frame: ReaderFrame | bytes) -> None:
        body = frame if isinstance(frame, bytes) else msgspec.msgpack.encode(frame)
        self.socket.sendall(len(body).to_bytes(LENGTH_BYTES, "little") + body)

    def received(self) -> bytes:
        """Returns everything that the owner sends until it ends the connection."""
        received = b""
        while True:
            self._owner.poll()
            if select.select([self.socket], [], [], 0.001)[0]:
                try:
                    chunk = self.socket.recv(2**16)
                except ConnectionResetError:
                    chunk = b""
                if not chunk:
                    self.socket.close()
                    return received
                received += chunk


@pytest.fixture
def segment() -> Iterator[SharedSegment]:
    segment = SharedSegment.create()
    yield segment
    segment.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seal": b"x" * 32}, b"not made with the secret"),
        ({"nonce": b"another nonce of"}, b"not made with the secret"),
        ({"segment": PREFIX + "0" * 32}, b"there is no motet-kv-"),
        ({"segment": "../../etc/passwd"}, b"is not the name of a segment"),
        ({"owner": "an earlier worker"}, b"not an earlier worker"),
    ],
)
def test_a_process_that_does_not_know_the_secret_reads_nothing(
    owner: Side, segment: SharedSegment, changes: dict[str, object], reason: bytes
) -> None:
    stranger = Stranger(owner)
    request = Open(description(owner).name, segment.name, NONCE, seal_of(segment, b"reader", nonce=NONCE))
    stranger.send(msgspec.structs.replace(request, **changes))
    stranger.send(ReadRequest(1, False, ((0, 1),)))
    assert reason in stranger.received()
    attached = SharedSegment.attach(segment.name)
    assert ctypes.string_at(attached.slot(0), NUM_SLOTS * SLOT_BYTES).count(0) == NUM_SLOTS * SLOT_BYTES
    attached.close()


@pytest.mark.parametrize(
    "frame",
    [
        ReadRequest(1, False, ((0, 1),)),
        Notification(b"a message of a stranger"),
        Taken(),
        b"garbage",
        b"",
        b"\x91" * MAX_FIRST_FRAME_BYTES,
        b"x" * (MAX_FIRST_FRAME_BYTES + 1),
    ],
    ids=["read", "notification", "taken", "garbage", "empty", "nested", "long"],
)
def test_a_process_that_opens_no_segment_is_disconnected_and_sends_no_message(
    owner: Side, frame: ReaderFrame | bytes
) -> None:
    stranger = Stranger(owner)
    stranger.send(frame)
    assert stranger.received() == b""
    assert owner.inbox == []


def test_many_silent_connections_do_not_keep_readers_out(owner: Side, reader: Side) -> None:
    strangers = [Stranger(owner) for _ in range(2 * MAX_UNPROVED)]
    owner.poll()
    owner.poll()
    name = reader.connect(owner)
    assert finish(reader.read(name, [(0, 1)]), reader, owner) is ReadState.DONE
    for stranger in strangers:
        stranger.socket.close()


def test_a_process_at_the_port_of_an_owner_cannot_make_a_reader_accept_its_blocks(reader: Side) -> None:
    before = reader.kv.copy()
    with socket.create_server((LOOPBACK, 0)) as impostor:
        claimed = msgspec.msgpack.encode(Description("owner", impostor.getsockname()[1]))
        name = reader.transport.connect(claimed, KVMemory().memory)
        read = reader.read(name, [(0, 1)])
        reader.transport.notify(name, b"only for the owner")
        connection, _ = impostor.accept()
        with connection:
            body = msgspec.msgpack.encode(Opened(b"x" * 32))
            connection.sendall(len(body).to_bytes(LENGTH_BYTES, "little") + body)
            assert finish(read, reader) is ReadState.FAILED
            assert b"only for the owner" not in connection.recv(2**16)
    reader.kv.expect(before, reader.kv, [])
    with failing(FailureKind.PEER_LOST):
        reader.read(name, [(0, 1)])


def test_only_a_private_file_of_this_user_is_a_segment(segment: SharedSegment, memory_folder: Path) -> None:
    path = memory_folder / segment.name
    assert path.stat().st_mode & 0o777 == 0o600
    SharedSegment.attach(segment.name).close()
    path.chmod(0o644)
    with pytest.raises(OSError, match="not a segment of this user"):
        SharedSegment.attach(segment.name)
    path.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
        with pytest.raises(OSError, match="not a segment of this user"):
            SharedSegment.attach(segment.name)
    with path.open("ab") as longer:
        longer.write(b"x")
    with pytest.raises(OSError, match="not a segment of this user"):
        SharedSegment.attach(segment.name)


def test_links_and_pipes_are_not_segments(segment: SharedSegment, memory_folder: Path) -> None:
    link, pipe = memory_folder / (PREFIX + "a" * 32), memory_folder / (PREFIX + "b" * 32)
    link.symlink_to(memory_folder / segment.name)
    os.mkfifo(pipe, 0o600)
    try:
        for path in (link, pipe):
            with pytest.raises(OSError, match=r"symbolic links|not a segment|No such device"):
                SharedSegment.attach(path.name)
    finally:
        link.unlink()
        pipe.unlink()


def test_without_a_folder_in_memory_segments_are_temporary_files(
    tmp_path: Path, memory_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_segment, "MEMORY_FOLDER", tmp_path / "missing")
    segment = SharedSegment.create()
    assert {path.name for path in tmp_path.iterdir()} == {memory_folder.name, segment.name}
    SharedSegment.attach(segment.name).close()
    segment.close()
    assert list(tmp_path.iterdir()) == [memory_folder]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(OSError, match=r"no memory can be shared \(.*missing: No such file"):
        SharedSegment.create()


@pytest.mark.slow
def test_a_full_disk_is_an_error_when_the_segment_is_created_and_never_later(tmp_path: Path) -> None:
    """A page that is missing when it is used would end the process (SIGBUS)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (SEGMENT_BYTES // 2, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(OSError, match="File too large"):
            SharedSegment.create()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_a_connected_reader_leaves_no_file_that_a_kill_could_leave_behind(owner: Side, reader: Side) -> None:
    before = segments()
    name = reader.connect(owner)
    assert len(segments() - before) == 1
    assert finish(reader.read(name, [(0, 1)]), reader, owner) is ReadState.DONE
    assert segments() == before


def test_the_next_start_removes_the_file_of_a_killed_reader_and_no_other(
    segment: SharedSegment, memory_folder: Path
) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_READER, str(memory_folder)], capture_output=True, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    abandoned = killed.stdout.strip()
    assert {abandoned, segment.name} <= segments()
    a_side().transport.close()
    assert abandoned not in segments()
    assert segment.name in segments()
    segment.unlink()
    remove_abandoned()


def test_files_of_other_users_are_not_opened(memory_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user can make a million of them: to open each one delayed the start of a worker by a minute."""
    (path := memory_folder / (PREFIX + "0" * 32)).touch()
    with monkeypatch.context() as another_user:
        another_user.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
        another_user.setattr(os, "open", lambda *_: pytest.fail("it was opened"))
        remove_abandoned()
    assert path.exists()
    remove_abandoned()
    assert not path.exists()


@pytest.mark.parametrize("block_bytes", [2**16], indirect=True)
def test_one_poll_copies_at_most_the_slots(owner: Side, reader: Side) -> None:
    read = reader.read(reader.connect(owner), [(block, block) for block in range(24)])
    before = reader.kv.copy()
    poll_until(lambda: (reader.kv.blocks[0, 0] != before[0, 1]).any(), reader, owner)
    changed = int((reader.kv.blocks != before[:, 1:-1]).sum())
    assert changed <= NUM_SLOTS * SLOT_BYTES < read.num_bytes
    assert finish(read, reader, owner) is ReadState.DONE


def test_a_read_that_runs_when_the_owner_deregisters_its_memory_fails(owner: Side, reader: Side) -> None:
    name = reader.connect(owner)
    assert finish(reader.read(name, [(0, 1)]), reader, owner) is ReadState.DONE
    assert owner.transport.deregister_blocks()
    assert finish(reader.read(name, [(2, 3)]), reader, owner) is ReadState.FAILED
    read, values = reader.transport.read_proof(name, [1])
    assert finish(read, reader, owner) is ReadState.DONE
    assert tuple(values) == owner.kv.proof.generations([1])
    owner.transport.register_blocks()
    assert finish(reader.read(name, [(2, 3)]), reader, owner) is ReadState.DONE


def test_an_owner_that_ends_wakes_its_reader_once(owner: Side) -> None:
    poller, kv = zmq.Poller(), KVMemory()
    reader = Side(SharedMemoryTransport("woken", kv.memory, poller=poller), kv)
    name = reader.connect(owner)
    assert finish(reader.read(name, [(0, 1)]), reader, owner) is ReadState.DONE
    reader.poll()
    assert (poller.poll(0), reader.transport.has_arrivals()) == ([], False)
    owner.transport.close()
    assert poller.poll(int(PATIENCE_S * 1000))
    assert reader.transport.has_arrivals()
    reader.poll()
    assert (poller.poll(0), reader.transport.has_arrivals()) == ([], False)
    with failing(FailureKind.PEER_LOST):
        reader.read(name, [(0, 1)])
    reader.transport.close()


def test_idle_transports_cost_nothing(owner: Side, reader: Side) -> None:
    assert finish(reader.read(reader.connect(owner), [(0, 0)]), reader, owner) is ReadState.DONE
    before_s, threads = time.process_time(), psutil.Process().num_threads()
    time.sleep(0.2)  # not for synchronisation: the CPU time of this interval is measured
    assert time.process_time() - before_s < 0.1
    assert psutil.Process().num_threads() == threads


def test_the_memory_of_a_gpu_is_refused_with_the_remedy() -> None:
    memory = msgspec.structs.replace(KVMemory().memory, device=0)
    with pytest.raises(StartupError, match="pip install nixl-cu13"):
        SharedMemoryTransport("gpu", memory)
