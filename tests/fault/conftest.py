"""Servers of several engines for tests of faults, and the answers that they return without a fault."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.fault.oracle import Undisturbed
from tests.fault.running_cell import RunningCell
from tests.forked import ForkingProcess


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """All tests run in one loop, so that several can use one cell."""
    return "asyncio"


@pytest.fixture(scope="session")
async def undisturbed(folder: Path, forking: ForkingProcess) -> AsyncIterator[Undisturbed]:
    async with AsyncExitStack() as stack:
        yield Undisturbed(folder, forking.spawn, stack)


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes engines that start from now on move KV over TCP, as between machines. Over shared memory, the KV of a
    stopped process could still be read."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture(params=["shared-memory", "nixl"])
def backend(request: pytest.FixtureRequest, over_tcp: None) -> dict[str, object]:
    """Returns settings of an engine: what moves its KV. With both, the KV of a stopped process cannot be read."""
    return {"kv_transfer_backend": request.param}


@pytest.fixture
async def cell(shared: RunningCell) -> AsyncIterator[RunningCell]:
    """The cell that all tests of a module share. All its engines are available before each test, which must leave
    nothing in it."""
    await shared.restored()
    yield shared
    await shared.check_nothing_left()
