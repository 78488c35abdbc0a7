"""Messages between the API process and an engine process: msgspec over two ZeroMQ pipes, one for each direction.

    API process ── Command ──► engine process        ipc://FOLDER/commands
    API process ◄── Event ───  engine process        ipc://FOLDER/events

The engine process can receive many commands between two steps. A step sends one event, whatever the number of groups
and choices. A second thread of the engine process sends a Heartbeat twice a second, through its own connection to the
same address.

Where ZeroMQ has no pipes of the file system (Windows), they are TCP sockets of the loopback address. Other users of the
machine can reach them, so CURVE keeps out and encrypts: a process can only connect if it knows the key in its `Launch`.
"""

import contextlib
import shutil
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from motet.engine_info import EngineInfo
from motet.engine_orders import EngineOrder, OrderAnswer
from motet.engines.wire import CarriedError
from motet.errors import StartupError
from motet.ids import RequestId
from motet.kv_events.changes import BlockChange
from motet.settings.engine_config import EngineConfig
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest, GroupDelta

LOOPBACK = "tcp://127.0.0.1"
Pipe = Literal["commands", "events"]


class Loopback(msgspec.Struct, frozen=True):
    """The pipes as TCP sockets of the loopback address."""

    ports: dict[Pipe, int]
    key: str
    """CURVE's public key of the API process, known to the engine process only."""


class Launch(msgspec.Struct, frozen=True):
    """The engine to start, as a line of JSON on the engine process's standard input."""

    config: EngineConfig
    folder: str
    """Folder of the pipes until the engine is connected. If both processes end before that, the last one removes it."""

    loopback: Loopback | None = None
    """Addresses of the pipes; None if they are in the folder."""

    def address(self, pipe: Pipe) -> str:
        return f"ipc://{self.folder}/{pipe}" if self.loopback is None else f"{LOOPBACK}:{self.loopback.ports[pipe]}"

    def connect(self, socket: "zmq.Socket[bytes]", pipe: Pipe) -> None:
        """Connects a socket of the engine process to a pipe."""
        if self.loopback is not None:
            public, secret = zmq.curve_keypair()
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.loopback.key.encode())
        socket.connect(self.address(pipe))


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: GenerateRequest


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Computes the KV of the prompt for other workers. The result is a ticket or a failure, unless it is aborted."""

    request: GenerateRequest
    readers: int


class Release(msgspec.Struct, frozen=True, tag=True):
    ticket: Ticket


class Abort(msgspec.Struct, frozen=True, tag=True):
    request_id: RequestId


class StopChoiceCommand(msgspec.Struct, frozen=True, tag=True):
    request_id: RequestId
    index: int


class NumberedOrder(msgspec.Struct, frozen=True, tag=True):
    """An order to the engine; answered by a NumberedAnswer with the same number."""

    number: int
    order: EngineOrder


class Close(msgspec.Struct, frozen=True, tag=True):
    pass


Command = Submit | Prefill | Release | Abort | StopChoiceCommand | NumberedOrder | Close


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start. The process ends after this event."""

    error: CarriedError


class StepReport(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The results of a step. `core.StepResult` describes the fields."""

    deltas: list[GroupDelta] = []
    failures: dict[RequestId, CarriedError] = {}
    tickets: dict[RequestId, Ticket] = {}
    blocks: list[BlockChange] = []


class NumberedAnswer(msgspec.Struct, frozen=True, tag=True):
    """The answer to the order with this number, or the reason why the engine refuses the order."""

    number: int
    answer: OrderAnswer | None
    error: CarriedError | None = None


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Shows that the engine process is alive. Has its own connection, so it can overtake other events."""

    busy_s: float
    """Duration of the current step so far, in seconds; 0 between two steps."""


Event = Ready | StartFailed | StepReport | NumberedAnswer | Heartbeat


class Pipes:
    """The API process's ends of the two pipes, made before the engine process is started.

    Their folder is removed as soon as the engine is connected. So no folder is left if both processes are killed at the
    same time: by a machine that is out of memory, or by Ray, which also kills a replica's children."""

    def __init__(self, launch: Launch) -> None:
        """Raises StartupError, and removes the folder, if the sockets cannot be opened."""
        self.launch = launch
        """The launch for the engine process, with the addresses of the pipes."""
        self._folder_is_needed = True
        with contextlib.ExitStack() as undo:
            undo.callback(self._remove_folder)
            try:
                context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
                undo.callback(context.term)
                self._commands = context.socket(zmq.PUSH)
                undo.callback(self._commands.close, linger=0)
                # The pipe stores any number of commands until the engine takes them: admission bounds the groups.
                self._commands.set_hwm(0)
                self._events = zmq.asyncio.Context(context).socket(zmq.PULL)
                undo.callback(self._events.close, linger=0)
                if zmq.has("ipc"):
                    self._commands.bind(launch.address("commands"))
                    self._events.bind(launch.address("events"))
                else:
                    self._bind_to_loopback()
            except zmq.ZMQError as exc:  # too many open files, or too long a name
                raise StartupError(f"the pipes to an engine process cannot be made in {launch.folder}: {exc}") from exc
            self._closing = undo.pop_all()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)

    def send(self, command: Command) -> None:
        """Sends a command. Never blocks."""
        with contextlib.suppress(zmq.Again):  # the engine process has ended; NativeEngine reports its death
            self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)

    async def receive(self) -> Event:
        return self._decoder.decode(await self._events.recv())

    def record_heartbeat(self) -> None:
        """Called at each Heartbeat after Ready. Ready and Heartbeat each use one connection of the engine. Once its
        third connection, for commands, exists too, removes the folder."""
        if self._folder_is_needed and self._commands.poll(0, zmq.POLLOUT):
            self._remove_folder()

    def close(self) -> None:
        self._closing.close()

    def _bind_to_loopback(self) -> None:
        public, secret = zmq.curve_keypair()
        for socket in (self._commands, self._events):
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        commands = self._commands.bind_to_random_port(LOOPBACK)
        events = self._events.bind_to_random_port(LOOPBACK)
        loopback = Loopback({"commands": commands, "events": events}, public.decode())
        self.launch = msgspec.structs.replace(self.launch, loopback=loopback)

    def _remove_folder(self) -> None:
        shutil.rmtree(self.launch.folder, ignore_errors=True)
        self._folder_is_needed = False
