"""The engine process: `python -m motet.engines.native.process`, started by `client` and by nobody else.

    1. one line of JSON on standard input says what to build and where the pipes are
    2. Ready or Unable goes out
    3. commands are taken between steps; with nothing to do the process sleeps in `poll`; a second thread sends signs of
       life (`heart`)
    4. it ends at Close, or when standard input ends: the parent holds the other end, however it dies

SIGINT and SIGTERM are ignored: a terminal and a service manager send them to every process at once, and the parent,
which has them too, wants to drain first.
"""

import gc
import logging
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from io import FileIO
from pathlib import Path

import msgspec
import zmq
from transformers.utils.logging import disable_progress_bar

from motet.engines.native.build import build_core
from motet.engines.native.core import EngineCore
from motet.engines.native.heart import Heart
from motet.engines.native.protocol import (
    Abort,
    AskStats,
    CarriedTransferError,
    Close,
    Command,
    Connect,
    Connected,
    Event,
    Launch,
    Prefill,
    Ready,
    Release,
    Stats,
    Stepped,
    StopChoice,
    Submit,
    Unable,
)
from motet.engines.native.pulse import beat_every_s
from motet.engines.wire import CarriedError
from motet.errors import MotetError, RequestError, StartupError
from motet.ids import RequestId

logger = logging.getLogger(__name__)


class EngineLoop:
    """Feeds a core from one pipe and empties it into another."""

    def __init__(
        self, core: EngineCore, heart: Heart, commands: "zmq.Socket[bytes]", events: "zmq.Socket[bytes]"
    ) -> None:
        self._core = core
        self._heart = heart
        self._commands = commands
        self._events = events
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        self._encoder = msgspec.msgpack.Encoder()
        self._refused: dict[RequestId, MotetError] = {}
        self._closing = False
        self._idle = True
        self._anything = zmq.Poller()
        self._anything.register(commands, zmq.POLLIN)
        if (news := core.transfers.fileno()) is not None:
            self._anything.register(news, zmq.POLLIN)

    def run(self) -> None:
        """Returns at Close."""
        self._send(Ready(self._core.info))
        while not self._closing:
            self._take_commands()
            if not self._closing:
                self._step()

    def _step(self) -> None:
        self._heart.work()
        result = self._core.step()
        self._heart.rest()
        self._idle = not result.ran
        failures = {**self._refused, **result.failures}
        self._refused = {}
        for met in result.met:
            failure = None if met.error is None else CarriedTransferError(met.error.kind, met.error.message)
            self._send(Connected(met.number, failure))
        if result.deltas or failures or result.tickets or result.blocks:
            self._send(
                Stepped(
                    result.deltas,
                    {request_id: CarriedError.of(error) for request_id, error in failures.items()},
                    result.tickets,
                    result.blocks,
                )
            )

    def _take_commands(self) -> None:
        """Waits for a command, for news of transfers or for a lease to end, when there is nothing to compute."""
        if self._idle and not self._refused:
            self._anything.poll(self._patience_ms())
        while self._commands.poll(0):
            self._heart.work()
            self._obey(self._decoder.decode(self._commands.recv()))
            self._heart.rest()

    def _patience_ms(self) -> int | None:
        wake_s = self._core.wake_s
        return None if wake_s is None else max(0, math.ceil((wake_s - time.monotonic()) * 1000))

    def _obey(self, command: Command) -> None:
        match command:
            case Submit(request):
                self._try(request.request_id, partial(self._core.submit, request))
            case Prefill(request, readers):
                self._try(request.request_id, partial(self._core.prefill, request, readers=readers))
            case Release(ticket):
                self._core.release(ticket)
            case Connect(number, address):
                self._core.transfers.meet(number, address)
            case Abort(request_id):
                self._core.abort(request_id)
            case StopChoice(request_id, index):
                self._core.stop_choice(request_id, index)
            case AskStats(number, check):
                if check:
                    self._core.check()
                self._send(Stats(number, self._core.stats()))
            case Close():
                self._closing = True

    def _try(self, request_id: RequestId, submit: Callable[[], None]) -> None:
        try:
            submit()
        except RequestError as error:
            self._refused[request_id] = error

    def _send(self, event: Event) -> None:
        self._heart.rest()  # a parent that does not read may hold this up; that is no step of ours
        self._events.send(self._encoder.encode(event))


def main() -> int:
    """Exit code 0 after Close, that of the StartupError if there was one, 1 after a crash (with its traceback)."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s engine %(message)s", level=logging.INFO)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    # Unbuffered: a thread that waits inside a buffered reader holds its lock, and the interpreter cannot end.
    stdin = FileIO(sys.stdin.fileno(), closefd=False)
    launch = msgspec.json.decode(stdin.readline(), type=Launch)
    threading.Thread(target=_end_with_parent, args=(stdin, Path(launch.folder)), daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.PULL) as commands, context.socket(zmq.PUSH) as events:
        commands.connect(launch.commands_address)
        events.connect(launch.events_address)
        try:
            core = build_core(launch.config, pid=os.getpid())
        except StartupError as error:
            events.send(msgspec.msgpack.encode(Unable(CarriedError.of(error))))
            return error.exit_code
        # What the libraries made at import stays for good, and looking through all of it takes a fifth of a second.
        gc.collect()
        gc.freeze()
        every_s = beat_every_s(launch.config.heartbeat_timeout_s)
        try:
            with Heart(context, launch.events_address, every_s=every_s) as heart:
                EngineLoop(core, heart, commands, events).run()
        finally:
            core.transfers.close()
    return 0


def _end_with_parent(stdin: FileIO, folder: Path) -> None:
    """A parent that was killed could not remove the folder of the pipes."""
    while stdin.read(1024):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # from a thread, with the main one perhaps in the middle of a step


if __name__ == "__main__":
    sys.exit(main())
