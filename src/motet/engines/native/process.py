"""The engine process: what `__main__` runs once all is imported.

    1. one line of JSON on standard input says what to build and where the pipes are
    2. Ready or Unable goes out
    3. commands are taken between steps; with nothing to do the process sleeps in `poll`; a second thread sends signs of
       life (`heart`), others compile grammars (`compiling`)
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
from motet.engines.native.compiling import Compiling
from motet.engines.native.core import EngineCore
from motet.engines.native.heart import Heart
from motet.engines.native.matchers import at_once
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
from motet.types import EngineStats, GenerateRequest

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
        self._compiling = Compiling(core.grammars)
        self._refused: dict[RequestId, MotetError] = {}
        self._closing = False
        self._idle = True
        self._anything = zmq.Poller()
        self._anything.register(commands, zmq.POLLIN)
        self._anything.register(self._compiling.fileno(), zmq.POLLIN)
        if (news := core.transfers.fileno()) is not None:
            self._anything.register(news, zmq.POLLIN)

    def run(self) -> None:
        """Returns at Close."""
        self._send(Ready(self._core.info))
        try:
            while not self._closing:
                self._take_commands()
                self._take_compiled()
                if not self._closing:
                    self._step()
        finally:
            self._compiling.close()

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

    def _take_compiled(self) -> None:
        for compiled in self._compiling.take():
            request, matchers = compiled.request, compiled.matchers
            if isinstance(matchers, MotetError):
                self._refuse(request, matchers)
            else:
                self._try(request.request_id, partial(self._core.submit, request, matchers))

    def _patience_ms(self) -> int | None:
        wake_s = self._core.wake_s
        return None if wake_s is None else max(0, math.ceil((wake_s - time.monotonic()) * 1000))

    def _obey(self, command: Command) -> None:
        match command:
            case Submit(request):
                self._submit(request)
            case Prefill(request, readers):
                self._try(request.request_id, partial(self._core.prefill, request, readers=readers))
            case Release(ticket):
                self._core.release(ticket)
            case Connect(number, address):
                self._core.transfers.meet(number, address)
            case Abort(request_id):
                self._abort(request_id)
            case StopChoice(request_id, index):
                self._stop_choice(request_id, index)
            case AskStats(number, check):
                if check:
                    self._core.check()
                self._send(Stats(number, self._stats()))
            case Close():
                self._closing = True

    def _try(self, request_id: RequestId, submit: Callable[[], None]) -> None:
        try:
            submit()
        except RequestError as error:
            self._refused[request_id] = error

    def _submit(self, request: GenerateRequest) -> None:
        submit = self._core.submit if at_once(self._core.grammars, request) else self._compiling.submit
        self._try(request.request_id, partial(submit, request))

    def _stop_choice(self, request_id: RequestId, index: int) -> None:
        if not self._compiling.stop_choice(request_id, index):
            self._abort(request_id)
        self._core.stop_choice(request_id, index)

    def _abort(self, request_id: RequestId) -> None:
        if (compiling := self._compiling.abort(request_id)) is None:
            self._core.abort(request_id)
        elif compiling.ticket is not None:
            self._core.release(compiling.ticket)

    def _refuse(self, request: GenerateRequest, error: MotetError) -> None:
        self._refused[request.request_id] = error
        if request.ticket is not None:
            self._core.release(request.ticket)

    def _stats(self) -> EngineStats:
        """Groups whose grammars are being compiled wait too."""
        stats, compiling = self._core.stats(), self._compiling.waiting
        return msgspec.structs.replace(
            stats,
            groups_waiting=stats.groups_waiting + len(compiling),
            choices_waiting=stats.choices_waiting + sum(len(request.choices) for request in compiling),
        )

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
        # The model stays for good, so no full round need go through it; what was imported is frozen already.
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
