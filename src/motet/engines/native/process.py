"""The engine process: `__main__` runs this once all modules are imported.

    1. `__main__` reads a `Launch` from standard input: one line of JSON with the settings and the folder of the pipes.
    2. It sends Ready or StartFailed.
    3. It takes commands between steps. If there is nothing to compute, it waits in `poll`. Other threads send
       heartbeats (`HeartbeatThread`), compile grammars (`compiling`) and read weights (`weight_loader`).
    4. It ends at Close, or when standard input ends, because the parent process has ended.

SIGINT and SIGTERM are ignored: a terminal and a service manager send them to every process at once, and the parent,
which gets them too, drains first.
"""

import contextlib
import gc
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Self

import msgspec
import zmq
from transformers.utils.logging import disable_progress_bar

from motet import engine_orders as orders
from motet.engine_info import EngineInfo
from motet.engines.native import protocol
from motet.engines.native.adapters.adapter_loader import AdapterThreads
from motet.engines.native.adapters.low_rank import ServedAdapter
from motet.engines.native.build import build_parts, core_over
from motet.engines.native.compiling import Compiling, at_once
from motet.engines.native.core import EngineCore
from motet.engines.native.protocol import Command, Launch
from motet.engines.native.sleep import Sleeper
from motet.engines.native.spawn import heartbeat_every_s
from motet.engines.native.step.handover import NO_TRANSFERS
from motet.engines.native.weight_loader import WeightThreads
from motet.engines.wire import CarriedError
from motet.errors import EngineError, MotetError, StartupError
from motet.ids import RequestId
from motet.log import MOTET, LogFormat, TextFormatter, capture_process, setup_logging
from motet.metrics.stats import EngineStats
from motet.settings.engine_config import EngineConfig
from motet.transfer.orders import ConnectWorker
from motet.transfer.ticket import Ticket

logger = logging.getLogger(__name__)

COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
EVENTS = msgspec.msgpack.Encoder()


class EngineLoop:
    """Takes commands for a core from one pipe, and sends the results of the core to the other."""

    def __init__(
        self,
        core: EngineCore,
        heartbeat: "HeartbeatThread",
        *,
        weights: WeightThreads,
        adapters: AdapterThreads,
        sleeper: Sleeper,
        commands: "zmq.Socket[bytes]",
        events: "zmq.Socket[bytes]",
    ) -> None:
        self._core = core
        self._weights = weights
        self._adapters = adapters
        self._sleeper = sleeper
        self._heartbeat = heartbeat
        self._commands = commands
        self._events = events
        self._compiling = Compiling(core.maker.grammars)
        self._refused: dict[RequestId, MotetError] = {}
        """Errors of groups that were refused since the last step."""
        self._closing = False
        self._idle = True
        self._wakers = zmq.Poller()
        self._wakers.register(commands, zmq.POLLIN)
        self._wakers.register(self._compiling.fileno(), zmq.POLLIN)
        self._wakers.register(weights.fileno(), zmq.POLLIN)
        self._wakers.register(adapters.fileno(), zmq.POLLIN)
        if core.transfers is not None:
            self._wakers.register(core.transfers.fileno(), zmq.POLLIN)

    def run(self) -> None:
        self._send(protocol.Ready(self._core.info))
        try:
            while not self._closing:
                self._take_commands()
                self._take_compiled()
                self._take_read()
                if not self._closing:
                    self._step()
        finally:
            self._compiling.close()
            self._weights.close()
            self._adapters.close()

    def _step(self) -> None:
        self._heartbeat.work()
        result = self._core.step()
        self._heartbeat.rest()
        self._idle = not result.ran
        for connected in result.connected:
            error = connected.error
            self._answer(connected.number, orders.Done() if error is None else EngineError(error.message))
        errors = {**self._refused, **result.failures}
        self._refused = {}
        failures = {request_id: CarriedError.of(error) for request_id, error in errors.items()}
        if result.deltas or failures or result.tickets or result.blocks:
            self._send(protocol.StepReport(result.deltas, failures, result.tickets, result.blocks))

    def _take_commands(self) -> None:
        """Takes all commands. With nothing to compute, waits for a command, a thread's result or a lease's end."""
        if self._idle and not self._refused:
            wake_s = self._core.wake_s
            self._wakers.poll(None if wake_s is None else max(0, math.ceil((wake_s - time.monotonic()) * 1000)))
        while self._commands.poll(0):
            self._heartbeat.work()
            self._take(COMMANDS.decode(self._commands.recv()))
            self._heartbeat.rest()

    def _take_compiled(self) -> None:
        for request, matchers in self._compiling.take():
            if not isinstance(matchers, MotetError):
                self._try(request.request_id, partial(self._core.submit, request, matchers))
                continue
            self._refused[request.request_id] = matchers
            if request.ticket is not None:
                self._release(request.ticket)

    def _take_read(self) -> None:
        """Takes what threads have read: weights, which a later order applies, and adapters, which are applied now."""
        for number, answer in self._weights.take():
            self._answer(number, answer)
        for number, order, adapter in self._adapters.take():
            self._answer(number, adapter if isinstance(adapter, MotetError) else self._load(adapter, order))

    def _load(self, adapter: ServedAdapter, order: orders.LoadAdapter) -> orders.EngineFacts | MotetError:
        try:
            info = self._core.adapters.load(adapter, in_place=order.in_place)
        except MotetError as error:
            return error
        self._idle = False
        logger.info("adapter %s, version %s, can be requested", adapter.info.name, adapter.info.version)
        return orders.EngineFacts(info)

    def _take(self, command: Command) -> None:
        match command:
            case protocol.Submit(request):
                submit = self._core.submit if at_once(self._core.maker.grammars, request) else self._compiling.submit
                self._try(request.request_id, partial(submit, request))
            case protocol.Prefill(request, readers):
                self._try(request.request_id, partial(self._core.prefill, request, readers=readers))
            case protocol.Release(ticket):
                self._release(ticket)
            case protocol.Abort(request_id):
                self._abort(request_id)
            case protocol.StopChoiceCommand(request_id, index):
                if not self._compiling.stop_choice(request_id, index):
                    self._abort(request_id)
                self._core.stop_choice(request_id, index)
            case protocol.NumberedOrder(number, order):
                self._give_order(number, order)
            case protocol.Close():
                self._closing = True

    def _give_order(self, number: int, order: orders.EngineOrder) -> None:
        try:
            if (answer := self._execute(number, order)) is not None:
                self._answer(number, answer)
        except MotetError as error:
            self._answer(number, error)

    def _execute(self, number: int, order: orders.EngineOrder) -> orders.OrderAnswer | None:  # noqa: C901  one case for each order
        """Returns the answer to an order; None if it is sent later. Raises MotetError if the order is refused."""
        match order:
            case orders.PrepareWeights() | orders.SumWeights():
                self._weights.start(number, order)
                return None
            case orders.LoadAdapter(name, in_place=in_place):
                self._core.adapters.check(name, in_place=in_place)
                self._adapters.start(number, order)
                return None
            case orders.UnloadAdapter(name):
                return orders.EngineFacts(self._core.adapters.unload(name))
            case orders.ApplyWeights(version, digest):
                return orders.EngineFacts(self._apply(version, digest=digest))
            case orders.DropWeights(digest):
                self._weights.drop(digest)
            case orders.NameWeights(version):
                self._core.maker.info = msgspec.structs.replace(self._core.info, weight_version=version)
                return orders.EngineFacts(self._core.info)
            case orders.Hold(held):
                self._core.held, self._idle = held, False
            case orders.ForgetPrefixes(recompute):
                self._core.forget_prefixes(recompute=recompute)
                self._idle = False  # the next step reports which blocks are gone
            case orders.Connect(address):
                if self._core.transfers is None:
                    raise EngineError(NO_TRANSFERS)
                self._core.transfers.order(ConnectWorker(number, address))
                return None
            case orders.Sleep(weights):
                self._weights.drop()
                self._sleeper.sleep(weights=weights)
                self._idle = False
            case orders.Wake():
                self._sleeper.wake()
            case orders.ReadStats(check):
                return orders.EngineFigures(self._stats(check=check))
        return orders.Done()

    def _apply(self, version: str, *, digest: str) -> EngineInfo:
        loaded = self._weights.take_loaded(digest)
        info = self._weights.loader.applied(loaded, self._core.info, version=version)
        self._core.update(info, loaded.staged.apply)
        self._idle = False
        facts = loaded.prepared
        logger.info("new weights, version %s: %d tensors, read in %.2f s", version, facts.tensors, facts.seconds)
        return info

    def _try(self, request_id: RequestId, submit: Callable[[], None]) -> None:
        """Submits a group, or refuses it. The group has not started, so an unexpected error ends only this group."""
        try:
            submit()
        except MotetError as error:
            self._refused[request_id] = error
        except Exception as error:
            logger.exception("the engine cannot accept the group %s", request_id)
            self._refused[request_id] = EngineError(f"the engine cannot accept this group: {error!r}")

    def _abort(self, request_id: RequestId) -> None:
        if (compiling := self._compiling.abort(request_id)) is None:
            self._core.abort(request_id)
        elif compiling.ticket is not None:
            self._release(compiling.ticket)

    def _release(self, ticket: Ticket) -> None:
        """Ends a lease. If the ticket cannot be released, for instance after a client changed it, the lease expires."""
        try:
            self._core.release(ticket)
        except Exception:
            logger.exception("the engine cannot release the lease of %s", ticket.remote_request_id)

    def _stats(self, *, check: bool) -> EngineStats:
        """Returns the core's figures, with groups whose grammars are being compiled counted as waiting."""
        if check:
            self._core.check()
        stats, compiling = self._core.stats(), self._compiling.waiting
        stats.groups_waiting += len(compiling)
        stats.choices_waiting += sum(len(request.choices) for request in compiling)
        return stats

    def _answer(self, number: int, answer: orders.OrderAnswer | MotetError) -> None:
        if isinstance(answer, MotetError):
            self._send(protocol.NumberedAnswer(number, None, CarriedError.of(answer)))
        else:
            self._send(protocol.NumberedAnswer(number, answer))

    def _send(self, event: protocol.Event) -> None:
        self._heartbeat.rest()  # a parent that does not read can delay this, which is not part of the step
        self._events.send(EVENTS.encode(event))


class HeartbeatThread:
    """Sends heartbeats inside `with`, from a thread of its own.

    A stopped process sends no heartbeats, and neither does a process whose computing thread hangs and holds the
    interpreter's lock. If it hangs without the lock, the heartbeats report how long the current step has taken."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", launch: Launch, *, every_s: float) -> None:
        self._context = context
        self._launch = launch
        self._every_s = every_s
        self._present: object | None = None
        """A new object for each piece of work, None between two. Needs no lock: only the computing thread sets it."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def work(self) -> None:
        """Called when the computing thread starts a piece of work whose duration counts."""
        self._present = object()

    def rest(self) -> None:
        """Called at the end of the piece of work."""
        self._present = None

    def _beat(self) -> None:
        """Sends heartbeats. A step is measured in heartbeats, so time while the process is stopped does not count."""
        last: object | None = None
        busy_s = 0.0
        with self._context.socket(zmq.PUSH) as events:  # a socket belongs to one thread
            events.setsockopt(zmq.LINGER, 0)
            events.set_hwm(1)
            self._launch.connect(events, "events")
            while not self._over.wait(self._every_s):
                present = self._present
                busy_s = busy_s + self._every_s if present is not None and present is last else 0.0
                last = present
                with contextlib.suppress(zmq.Again):  # enough heartbeats wait to be read
                    events.send(msgspec.msgpack.encode(protocol.Heartbeat(busy_s)), zmq.NOBLOCK)


def main(message: bytes) -> int:
    """Runs the engine of a `Launch` in JSON. Returns 0 after Close, or the exit code of a StartupError. A crash
    raises its exception."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    disable_progress_bar()  # type: ignore[no-untyped-call]
    launch = msgspec.json.decode(message, type=Launch)
    _set_up_log(launch.config)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.PULL) as commands, context.socket(zmq.PUSH) as events:
        launch.connect(commands, "commands")
        launch.connect(events, "events")
        try:
            parts = build_parts(launch.config, pid=os.getpid())
            core = core_over(parts, launch.config)
        except StartupError as error:
            events.send(msgspec.msgpack.encode(protocol.StartFailed(CarriedError.of(error))))
            return error.exit_code
        # The model exists until the process ends, so the garbage collector need not scan it.
        gc.collect()
        gc.freeze()
        every_s = heartbeat_every_s(launch.config.heartbeat_timeout_s)
        try:
            with HeartbeatThread(context, launch, every_s=every_s) as heartbeat:
                sleeper = Sleeper(core, storage=parts.storage, weights=parts.weights)
                loop = EngineLoop(
                    core,
                    heartbeat,
                    weights=WeightThreads(parts.weights),
                    adapters=AdapterThreads(parts.adapters),
                    sleeper=sleeper,
                    commands=commands,
                    events=events,
                )
                loop.run()
        finally:
            if core.transfers is not None:
                core.transfers.close()
    return 0


def _set_up_log(config: EngineConfig) -> None:
    """Sends the log lines of this process, of its libraries too, to standard error in the format of the server."""
    if config.log_format == LogFormat.JSON:
        setup_logging(format=config.log_format, level=config.log_level)
        capture_process()
    else:
        lines = logging.StreamHandler(sys.stderr)
        lines.setFormatter(TextFormatter("%(asctime)s %(levelname)s engine %(message)s"))
        logging.basicConfig(handlers=[lines])
        MOTET.setLevel(config.log_level.upper())
    logging.getLogger().setLevel(max(logging.INFO, MOTET.level))  # libraries have too many lines for debugging
