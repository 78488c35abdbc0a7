"""The API process's ends of the two pipes to an engine process.

Their folder is there until the engine is connected. Whoever ends later has nothing to remove, so nothing is left where
both are killed at once: by a machine that is out of memory, or by Ray, which takes a replica's children with it.
"""

import contextlib
import shutil

import msgspec
import zmq
import zmq.asyncio

from motet.engines.native.protocol import Command, Event, Launch


class Pipes:
    """Made before the process is started, so that it finds them."""

    def __init__(self, launch: Launch) -> None:
        self._folder = launch.folder
        self._folder_is_needed = True
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._async_context = zmq.asyncio.Context(self._context)
        self._commands = self._context.socket(zmq.PUSH)
        # What an engine has not taken yet is kept here: groups are bounded by admission, not by this pipe.
        self._commands.set_hwm(0)
        self._commands.setsockopt(zmq.LINGER, 0)
        self._commands.bind(launch.commands_address)
        self._events = self._async_context.socket(zmq.PULL)
        self._events.bind(launch.events_address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)

    def send(self, command: Command) -> None:
        """Never blocks."""
        with contextlib.suppress(zmq.Again):  # nobody at the other end: its death is reported elsewhere
            self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)

    async def receive(self) -> Event:
        return self._decoder.decode(await self._events.recv())

    def beaten(self) -> None:
        """A Beat has come after Ready: they come through two of the three connections that an engine makes. The third
        one is that of commands."""
        if self._folder_is_needed and self._commands.poll(0, zmq.POLLOUT):
            self._remove_folder()

    def close(self) -> None:
        self._commands.close(linger=0)
        self._events.close(linger=0)
        self._context.term()
        self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder_is_needed = False
