"""Functions for hostile clients on raw sockets: they send floods, and read the status and the end of an answer."""

import asyncio

MIB = 2**20


async def status(reader: asyncio.StreamReader) -> int:
    """Returns the status of the next answer; 0 if the connection ends without one."""
    try:
        line = await reader.readline()
    except ConnectionError:
        return 0
    return int(line.split()[1]) if line else 0


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    """Returns everything that the server sends before it ends the connection."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def flood(writer: asyncio.StreamWriter, piece: bytes, *, total: int) -> int:
    """Sends a piece repeatedly. Returns the number of bytes that could be sent."""
    sent = 0
    try:
        while sent < total:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
    except ConnectionError:
        pass
    return sent
