"""Tiny models for tests that break things, and servers of several engines to be broken."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.engines.native.forked import ForkingProcess
from tests.fault.oracle import Undisturbed
from tests.fault.running_cell import RunningCell
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """One loop for all tests, so that several may use one cell."""
    return "asyncio"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama, with a tokenizer."""
    return save_tiny_tokenizer(save_tiny_model("llama", tmp_path_factory.mktemp("llama")))


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
