"""A wire between a gateway and a worker that can be cut without a word: nothing comes through and nothing is closed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Wire:
    """Passes bytes on between a port of its own and a server, until it is cut."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._port)
        async with asyncio.TaskGroup() as ways:
            ways.create_task(self._pass_on(reader, other_writer))
            ways.create_task(self._pass_on(other_reader, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(2**16):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        await self._whole.wait()  # the end of a connection does not get through either
        writer.close()


@asynccontextmanager
async def wire_to(url: str) -> AsyncIterator[tuple[Wire, str]]:
    wire = Wire(int(url.rpartition(":")[2]))
    server = await asyncio.start_server(wire, "127.0.0.1", 0)
    try:
        yield wire, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        wire.mend()
        server.close()
