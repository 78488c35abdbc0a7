"""NIXL prints nothing, leaks nothing and costs nothing when idle, and recovers from a broken connection."""

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from motet.errors import StartupError
from motet.transfer.backends.nixl import LOOPBACK, NixlTransport
from motet.transfer.orders import FailureKind
from motet.transfer.transport import ReadState
from tests.transfer.memory import TCP, KVMemory, Side, failing, finish, poll_until

starts = itertools.count()

LIFE_OF_A_TRANSPORT = """
from motet.transfer.backends.nixl import NixlTransport
from tests.transfer.memory import KVMemory
kv = KVMemory()
transport = NixlTransport("quiet", kv.memory)
transport.poll()
transport.close()
"""


def a_side() -> Side:
    kv = KVMemory()
    return Side(NixlTransport(f"worker-{next(starts)}", kv.memory, ucx=TCP), kv)


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    """Two workers that are not connected."""
    made = a_side(), a_side()
    yield made
    for side in made:
        side.transport.close()


def threads_and_files() -> tuple[int, int]:
    process = psutil.Process()
    return process.num_threads(), process.num_fds()


def sockets() -> set[int]:
    """Returns the descriptors of this process that are sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        path = Path("/proc/self/fd", name)
        if path.is_symlink() and path.readlink().name.startswith("socket:"):
            found.add(int(name))
    return found


@pytest.mark.slow
def test_a_transport_prints_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIFE_OF_A_TRANSPORT],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_a_loopback_transport_listens_on_loopback_only() -> None:
    before = set(psutil.Process().net_connections("inet"))
    transport = NixlTransport("loopback", KVMemory().memory, ucx=LOOPBACK)
    listening = {c.laddr.ip for c in set(psutil.Process().net_connections("inet")) - before if c.status == "LISTEN"}
    transport.close()
    assert listening == {"127.0.0.1"}


@pytest.mark.slow
def test_a_closed_transport_leaves_no_thread_and_no_socket(sides: tuple[Side, Side]) -> None:
    other, third = sides
    assert finish(other.read(other.connect(third), [(0, 0)]), other, third) is ReadState.DONE
    before = threads_and_files()
    closing = a_side()
    name, closings_name = closing.connect(other), other.connect(closing)
    assert finish(other.read(closings_name, [(0, 0)]), other, closing) is ReadState.DONE
    landed = closing.read(name, [(1, 1)])
    poll_until(lambda: landed.poll() is ReadState.DONE, closing, other)  # the read is never closed
    closing.transport.close()
    other.transport.disconnect(closings_name)
    poll_until(lambda: all(now <= then for now, then in zip(threads_and_files(), before, strict=True)), other, third)


@pytest.mark.slow
def test_idle_transports_cost_next_to_nothing(sides: tuple[Side, Side]) -> None:
    reader, owner = sides
    assert finish(reader.read(reader.connect(owner), [(0, 0)]), reader, owner) is ReadState.DONE
    before_s = time.process_time()
    time.sleep(2)  # not for synchronisation: the CPU time of these seconds is measured
    assert time.process_time() - before_s < 0.1, "a progress thread would have taken 2 s"


def test_a_broken_connection_is_made_again_at_the_next_connect(sides: tuple[Side, Side]) -> None:
    reader, owner = sides
    open_before = sockets()
    name = reader.connect(owner)
    assert finish(reader.read(name, [(0, 0)]), reader, owner) is ReadState.DONE
    for descriptor in sockets() - open_before:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    with failing(FailureKind.PEER_LOST):
        reader.read(name, [(1, 1)])
    before = reader.kv.copy()
    assert reader.connect(owner) == name
    assert finish(reader.read(name, [(2, 3)]), reader, owner) is ReadState.DONE
    reader.kv.expect(before, owner.kv, [(2, 3)])
    reader.transport.notify(name, b"here again")
    poll_until(lambda: owner.inbox == [b"here again"], reader, owner)


def test_another_start_under_an_old_name_is_refused(sides: tuple[Side, Side]) -> None:
    reader, _ = sides
    for is_first in (True, False):
        kv = KVMemory()
        again = Side(NixlTransport("the same name", kv.memory, ucx=TCP), kv)
        if is_first:
            reader.connect(again)
        else:
            with failing(FailureKind.RESTARTED):
                reader.connect(again)
        again.transport.close()


def test_memory_that_cannot_be_registered_is_a_startup_error() -> None:
    nowhere = msgspec.structs.replace(KVMemory().memory, regions=(0, 0, 0))
    with pytest.raises(StartupError, match="NIXL cannot register the KV cache"):
        NixlTransport("nowhere", nowhere, ucx=TCP)
