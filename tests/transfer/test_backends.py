"""The choice of the transport: NIXL where it is installed and can start, otherwise shared memory on one machine."""

import sys
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from motet.errors import StartupError
from motet.transfer.backends.nixl import bindings
from motet.transfer.backends.shared_memory import SharedMemoryTransport
from motet.transfer.backends.start import start_transport
from motet.transfer.ticket import TransportKind
from motet.transfer.transport import Transport
from tests.transfer.memory import KVMemory

NIXL_MODULES = ("nixl", "nixl_cu13", "motet.transfer.backends.nixl")
Start = Callable[..., Transport]


@pytest.fixture
def start() -> Iterator[Start]:
    """Returns a function that starts the transport of a worker."""
    started = list[Transport]()

    def start_one(backend: str, *, host: str = "127.0.0.1", device: int = -1) -> Transport:
        memory = msgspec.structs.replace(KVMemory().memory, device=device)
        started.append(start_transport(backend, "worker", memory=memory, host=host, poller=zmq.Poller()))
        return started[-1]

    yield start_one
    for transport in started:
        transport.close()


def without_nixl(patch: pytest.MonkeyPatch) -> None:
    for module in NIXL_MODULES:
        patch.setitem(sys.modules, module, None)  # an import of it raises ModuleNotFoundError


def with_nixl_that_cannot_start(patch: pytest.MonkeyPatch) -> None:
    """Lets NIXL fail as in a container without /sys."""

    def fail(*_: object) -> None:
        raise bindings.nixlBackendError("NIXL_ERR_BACKEND")

    patch.setattr("motet.transfer.backends.nixl.nixl.nixl_agent.create_backend", fail)


PROBLEMS = {"NIXL is not installed": without_nixl, "NIXL cannot start": with_nixl_that_cannot_start}


@pytest.fixture(params=PROBLEMS)
def problem(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The reason why NIXL cannot be used."""
    PROBLEMS[request.param](monkeypatch)
    return str(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "nixl"])
def test_nixl_is_used_where_it_can_start(start: Start, backend: str) -> None:
    assert start(backend).kind is TransportKind.NIXL


def test_shared_memory_needs_no_nixl(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    without_nixl(monkeypatch)
    assert isinstance(start("shared-memory", host="192.0.2.1"), SharedMemoryTransport)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_on_one_machine_shared_memory_takes_the_place_of_nixl(
    start: Start, problem: str, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="motet.transfer.backends.start"):
        assert start("auto", host=host).kind is TransportKind.SHARED_MEMORY
    assert problem in caplog.text


@pytest.mark.parametrize(
    ("backend", "host", "device", "remedy"),
    [
        ("auto", "192.0.2.1", -1, "install NIXL, or give --kv-transfer-backend shared-memory if all workers are on"),
        ("nixl", "127.0.0.1", -1, "give --kv-transfer-backend auto"),
        ("auto", "127.0.0.1", 0, "pip install nixl-cu13"),
    ],
    ids=["several machines", "nixl required", "gpu"],
)
def test_without_nixl_an_engine_that_needs_it_ends_with_the_reason_and_the_remedy(
    start: Start, problem: str, backend: str, host: str, device: int, remedy: str
) -> None:
    with pytest.raises(StartupError) as ended:
        start(backend, host=host, device=device)
    assert problem in ended.value.message
    assert remedy in ended.value.message
