"""Servers of several engines to be broken, and what they would have answered."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.fault.oracle import Undisturbed
from tests.fault.running_cell import RunningCell
from tests.forked import ForkingProcess


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """One loop for all tests, so that several may use one cell."""
    return "asyncio"


@pytest.fixture(scope="session")
async def undisturbed(folder: Path, forking: ForkingProcess) -> AsyncIterator[Undisturbed]:
    async with AsyncExitStack() as stack:
        yield Undisturbed(folder, forking.spawn, stack)


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines started from now on move KV over TCP, as between machines: through shared memory a stopped process can
    still be read."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
async def cell(shared: RunningCell) -> AsyncIterator[RunningCell]:
    """The one that the tests of a module share, whole before each of them; what a test leaves in it is a fault."""
    await shared.whole()
    yield shared
    await shared.check_nothing_left()
