"""The engine process: `__main__` runs this once all modules are imported.

    1. One line of JSON on standard input says what to build and where the pipes are.
    2. The process sends Ready or Unable.
    3. It takes commands between steps; with nothing to do it sleeps in `poll`. A second thread sends signs of life
       (`HeartbeatThread`), others compile grammars (`compiling`).
    4. It ends at Close, or when standard input ends: the parent holds the other end, however it dies.

SIGINT and SIGTERM are ignored: a terminal and a service manager send them to every process at once, and the parent,
which has them too, wants to drain first.
"""

import contextlib
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
from typing import Self

import msgspec
import zmq
from transformers.utils.logging import disable_progress_bar

from motet.engines.native import protocol
from motet.engines.native.build import build_parts, core_over
from motet.engines.native.compiling import Compiling, at_once
from motet.engines.native.core import EngineCore
from motet.engines.native.protocol import Command, Launch
from motet.engines.native.sleep import Sleeper
from motet.engines.native.spawn import beat_every_s
from motet.engines.native.step.handover import KEEPS_KV
from motet.engines.native.weights import Renewal, Renewing
from motet.engines.wire import CarriedError
from motet.errors import EngineError, MotetError, RequestError, StartupError
from motet.ids import RequestId
from motet.log import TextFormatter
from motet.metrics.stats import EngineStats
from motet.transfer.orders import MeetWorker
from motet.transfer.ticket import Ticket, TransferAddress
from motet.types import EngineInfo

logger = logging.getLogger(__name__)


class EngineLoop:
    """Feeds a core from one pipe and empties it into another."""

    def __init__(
        self,
        core: EngineCore,
        heart: "HeartbeatThread",
        *,
        renewal: Renewal,
        sleeper: Sleeper,
        commands: "zmq.Socket[bytes]",
        events: "zmq.Socket[bytes]",
    ) -> None:
        self._core = core
        self._renewal = renewal
        self._renewing = Renewing(renewal)
        self._sleeper = sleeper
        self._heart = heart
        self._commands = commands
        self._events = events
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        self._encoder = msgspec.msgpack.Encoder()
        self._compiling = Compiling(core.grammars)
        self._refused: dict[RequestId, MotetError] = {}
        """Errors of groups that were refused since the last step."""
        self._closing = False
        self._idle = True
        self._anything = zmq.Poller()
        self._anything.register(commands, zmq.POLLIN)
        self._anything.register(self._compiling.fileno(), zmq.POLLIN)
        self._anything.register(self._renewing.fileno(), zmq.POLLIN)
        if core.transfers is not None:
            self._anything.register(core.transfers.fileno(), zmq.POLLIN)

    def run(self) -> None:
        """Returns at Close."""
        self._send(protocol.Ready(self._core.info))
        try:
            while not self._closing:
                self._take_commands()
                self._take_compiled()
                for prepared in self._renewing.take():
                    self._send(prepared)
                if not self._closing:
                    self._step()
        finally:
            self._compiling.close()
            self._renewing.close()

    def _step(self) -> None:
        self._heart.work()
        result = self._core.step()
        self._heart.rest()
        self._idle = not result.ran
        for met in result.met:
            self._send(protocol.Connected(met.number, None if met.error is None else met.error.message))
        errors = {**self._refused, **result.failures}
        self._refused = {}
        failures = {request_id: CarriedError.of(error) for request_id, error in errors.items()}
        if result.deltas or failures or result.tickets or result.blocks:
            self._send(protocol.StepReport(result.deltas, failures, result.tickets, result.blocks))

    def _take_commands(self) -> None:
        """Takes all commands; with nothing to compute, waits for one, for news, or for a lease to end."""
        if self._idle and not self._refused:
            wake_s = self._core.wake_s
            self._anything.poll(None if wake_s is None else max(0, math.ceil((wake_s - time.monotonic()) * 1000)))
        while self._commands.poll(0):
            self._heart.work()
            self._obey(self._decoder.decode(self._commands.recv()))
            self._heart.rest()

    def _take_compiled(self) -> None:
        for request, matchers in self._compiling.take():
            if not isinstance(matchers, MotetError):
                self._try(request.request_id, partial(self._core.submit, request, matchers))
                continue
            self._refused[request.request_id] = matchers
            if request.ticket is not None:
                self._release(request.ticket)

    def _obey(self, command: Command) -> None:
        match command:
            case protocol.Submit(request):
                submit = self._core.submit if at_once(self._core.grammars, request) else self._compiling.submit
                self._try(request.request_id, partial(submit, request))
            case protocol.Prefill(request, readers):
                self._try(request.request_id, partial(self._core.prefill, request, readers=readers))
            case protocol.Release(ticket):
                self._release(ticket)
            case protocol.Connect(number, address):
                self._connect(number, address)
            case protocol.Abort(request_id):
                self._abort(request_id)
            case protocol.StopChoiceCommand(request_id, index):
                if not self._compiling.stop_choice(request_id, index):
                    self._abort(request_id)
                self._core.stop_choice(request_id, index)
            case protocol.AskStats(number, check):
                self._send(protocol.Stats(number, self._stats(check=check)))
            case _:
                self._obey_operator(command)

    def _obey_operator(self, command: Command) -> None:
        """Obeys commands that are for all groups."""
        match command:
            case protocol.Hold(number, held):
                self._core.held, self._idle = held, False
                self._send(protocol.Obeyed(number))
            case protocol.ForgetPrefixes(number, anew):
                self._core.forget_prefixes(anew=anew)
                self._idle = False  # the next step tells which blocks are gone
                self._send(protocol.Obeyed(number))
            case protocol.Sleep(number, weights):
                self._renewing.drop()
                self._sleeper.sleep(weights=weights)
                self._idle = False
                self._send(protocol.Obeyed(number))
            case protocol.Wake(number):
                self._sleeper.wake()
                self._send(protocol.Obeyed(number))
            case protocol.Close():
                self._closing = True
            case _:
                self._obey_trainer(command)

    def _obey_trainer(self, command: Command) -> None:
        """Obeys commands about weights."""
        match command:
            case protocol.PrepareWeights():
                self._renewing.prepare(command)
            case protocol.ApplyWeights(number, version):
                self._send(protocol.Renewed(number, self._renewed(version)))
            case protocol.NameWeights(number, version):
                self._core.info = msgspec.structs.replace(self._core.info, weight_version=version)
                self._send(protocol.Renewed(number, self._core.info))
            case protocol.SumWeights(number):
                self._renewing.sum(number)
            case protocol.DropWeights():
                self._renewing.drop()

    def _try(self, request_id: RequestId, submit: Callable[[], None]) -> None:
        """Takes a group in, or refuses it. Nothing has begun yet, so an unexpected error ends only this group."""
        try:
            submit()
        except RequestError as error:
            self._refused[request_id] = error
        except Exception as error:
            logger.exception("the engine cannot take in the group %s", request_id)
            self._refused[request_id] = EngineError(f"the engine cannot take in this group: {error!r}")

    def _abort(self, request_id: RequestId) -> None:
        if (compiling := self._compiling.abort(request_id)) is None:
            self._core.abort(request_id)
        elif compiling.ticket is not None:
            self._release(compiling.ticket)

    def _release(self, ticket: Ticket) -> None:
        """Ends a lease. A client may have changed the ticket: if it cannot be released, its lease expires."""
        try:
            self._core.release(ticket)
        except Exception:
            logger.exception("the engine cannot release the lease of %s", ticket.remote_request_id)

    def _connect(self, number: int, address: TransferAddress) -> None:
        if self._core.transfers is None:
            self._send(protocol.Connected(number, KEEPS_KV))
        else:
            self._core.transfers.order(MeetWorker(number, address))

    def _renewed(self, version: str) -> EngineInfo | None:
        """Applies new weights. Returns the facts from now on, or None if no weights are prepared."""
        if (prepared := self._renewing.prepared()) is None:
            return None
        info = self._renewal.applied(prepared, self._core.info, version=version)
        self._core.update(info, prepared.weights.apply)
        self._idle = False
        facts = prepared.facts
        logger.info("new weights, version %s: %d tensors, read in %.2f s", version, facts.tensors, facts.seconds)
        return info

    def _stats(self, *, check: bool) -> EngineStats:
        """Adds to the core's figures the groups whose grammars are being compiled: they wait too."""
        if check:
            self._core.check()
        stats, compiling = self._core.stats(), self._compiling.waiting
        stats.groups_waiting += len(compiling)
        stats.choices_waiting += sum(len(request.choices) for request in compiling)
        return stats

    def _send(self, event: protocol.Event) -> None:
        self._heart.rest()  # a parent that does not read may hold this up; that is no step of ours
        self._events.send(self._encoder.encode(event))


class HeartbeatThread:
    """Sends signs of life from a thread beside the one that computes, from entering to leaving.

    A process that is stopped sends none; neither does one whose computing thread hangs and keeps the interpreter's
    lock. One that hangs without it still beats, and its beats say for how long it has been in the same step.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, *, every_s: float) -> None:
        self._context = context
        self._address = address
        self._every_s = every_s
        self._present: object | None = None
        """A new object for each stretch of work, None between two. Only the computing thread sets it: no lock."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heart", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def work(self) -> None:
        """Called when the computing thread begins a stretch of work that must come to an end."""
        self._present = object()

    def rest(self) -> None:
        """Called at the end of that stretch."""
        self._present = None

    def _beat(self) -> None:
        """Measures a step's time in beats, so time in which the whole process is stopped does not count."""
        seen: object | None = None
        busy_s = 0.0
        with self._context.socket(zmq.PUSH) as events:  # a socket belongs to one thread
            events.setsockopt(zmq.LINGER, 0)
            events.set_hwm(1)
            events.connect(self._address)
            while not self._over.wait(self._every_s):
                present = self._present
                busy_s = busy_s + self._every_s if present is not None and present is seen else 0.0
                seen = present
                with contextlib.suppress(zmq.Again):  # enough beats are waiting to be read
                    events.send(msgspec.msgpack.encode(protocol.Heartbeat(busy_s)), zmq.NOBLOCK)


def main() -> int:
    """Returns exit code 0 after Close, the code of a StartupError, or 1 after a crash, with its traceback."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(TextFormatter("%(asctime)s %(levelname)s engine %(message)s"))
    logging.basicConfig(handlers=[lines], level=logging.INFO)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    # Unbuffered: a thread that waits inside a buffered reader holds its lock, and the interpreter cannot end.
    stdin = FileIO(sys.stdin.fileno(), closefd=False)
    launch = msgspec.json.decode(stdin.readline(), type=Launch)
    threading.Thread(target=_end_with_parent, args=(stdin, Path(launch.folder)), daemon=True).start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.PULL) as commands, context.socket(zmq.PUSH) as events:
        commands.connect(launch.address("commands"))
        events.connect(launch.address("events"))
        try:
            parts = build_parts(launch.config, pid=os.getpid())
            core = core_over(parts, launch.config)
        except StartupError as error:
            events.send(msgspec.msgpack.encode(protocol.StartFailed(CarriedError.of(error))))
            return error.exit_code
        # The model stays for ever, so the garbage collector need not look at it; imported modules are frozen already.
        gc.collect()
        gc.freeze()
        every_s = beat_every_s(launch.config.heartbeat_timeout_s)
        try:
            with HeartbeatThread(context, launch.address("events"), every_s=every_s) as heart:
                sleeper = Sleeper(core, storage=parts.storage, renewal=parts.renewal)
                EngineLoop(core, heart, renewal=parts.renewal, sleeper=sleeper, commands=commands, events=events).run()
        finally:
            if core.transfers is not None:
                core.transfers.close()
    return 0


def _end_with_parent(stdin: FileIO, folder: Path) -> None:
    """A parent that was killed could not remove the folder of the pipes."""
    while stdin.read(1024):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # from a thread, with the main one perhaps in the middle of a step
