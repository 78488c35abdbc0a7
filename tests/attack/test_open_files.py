"""The limit of open files is reached: the log has one line, and no worker counts as dead."""

import asyncio
import contextlib
import logging
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from motet.engines.http import NO_FILES_LEFT, server_client
from motet.engines.remote import EngineServer
from motet.errors import EngineDiedError, OverloadedError
from tests.deploy.running import Running

pytestmark = pytest.mark.anyio


@contextlib.contextmanager
def no_file_left() -> Iterator[None]:
    """Lowers the limit to the number of open files. Opening a connection then fails with EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = os.dup(0)
    os.close(highest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_worker_that_cannot_be_reached_without_open_files_is_not_dead(caplog: pytest.LogCaptureFixture) -> None:
    async with server_client() as client:
        server = EngineServer("http://127.0.0.1:9", client, id="w")
        with no_file_left(), pytest.raises(OverloadedError, match="no file descriptor left"):
            await server.report()
        assert [record.getMessage() for record in caplog.records] == [NO_FILES_LEFT]
        with pytest.raises(EngineDiedError, match=r"^the worker w did not answer: Connection refused$"):
            await server.report()


@pytest.mark.slow
async def test_a_connection_that_cannot_be_accepted_is_logged_in_one_line(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Running(folder) as server:
        assert (await server.http.get("/health")).status_code == 200
        error = OSError(24, "Too many open files")
        asyncio.get_running_loop().call_exception_handler({"message": "socket.accept()", "exception": error})
        assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == [NO_FILES_LEFT]
