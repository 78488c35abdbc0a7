"""Hands spans to the process that sends them (`tracing.export`), which lives as long as the server.

    Recorder ─► `Sender.take` ─► every 0.2 s all spans as one frame ─► standard input of the process ─► the collector

The server never waits for it: what the process does not read in time is dropped, and counted in the log. If it ends,
another one is started. At the server's end it has `CLOSE_S` to send what it has.
"""

import asyncio
import contextlib
import logging
import struct
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping
from importlib.metadata import PackageNotFoundError, version

import msgspec

from motet import __version__
from motet.errors import ConfigError
from motet.log import ONCE_A_MINUTE, LogFormat
from motet.tracing.spans import NO_TRACES, RecordingTracer, SpanRecord, Tracer
from motet.tracing.variables import Protocol, Variables

logger = logging.getLogger(__name__)

PACKAGES = {
    Protocol.HTTP: ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
    Protocol.GRPC: ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-grpc"),
}
PROGRAM = "motet.tracing.export"
DEFAULTS = {"OTEL_BSP_SCHEDULE_DELAY": "1000", "OTEL_BSP_MAX_QUEUE_SIZE": "16384"}
"""Variables of OpenTelemetry whose own defaults are for less traffic: milliseconds between two batches, and the number
of spans that may wait for one."""
HAND_OVER_S = 0.2
"""Seconds between two frames, while there are spans."""
MAX_UNREAD_BYTES = 8 * 2**20
"""Spans that the process has not read yet; more are dropped."""
START_AGAIN_S = 10.0
"""Least seconds between two starts of the process."""
CLOSE_S = 3.0
"""Seconds in which the process may send its last spans."""

LENGTH = struct.Struct(">I")
"""Begins each frame, which is msgpack: the number of its bytes."""


class ExportSettings(msgspec.Struct, frozen=True):
    """Begins what the process reads, as a frame of its own."""

    endpoint: str
    """The URL of the collector."""
    attributes: dict[str, str]
    """What all spans are of: the resource, in OpenTelemetry's words."""
    protocol: Protocol = Protocol.HTTP
    log_format: str = LogFormat.TEXT
    close_s: float = CLOSE_S


def traces_wanted(
    endpoint: str | None, environ: Mapping[str, str], *, find: Callable[[str], object] = version
) -> Variables | None:
    """Returns what OpenTelemetry's variables say of the traces that there are to be, or None if there are to be none.
    Raises ConfigError if one of them cannot be, or if a package is missing."""
    variables = Variables.of(environ) if endpoint else None
    if variables is None or variables.disabled:
        return None
    for package in PACKAGES[variables.protocol]:
        try:
            find(package)
        except PackageNotFoundError as error:
            raise ConfigError(
                f"--otlp-endpoint needs the package {package}, which is not installed: pip install 'motet[otel]'"
            ) from error
    return variables


@contextlib.asynccontextmanager
async def tracer_for(
    endpoint: str | None, *, name: str, environ: Mapping[str, str], log_format: str = LogFormat.TEXT
) -> AsyncIterator[Tracer]:
    """Yields the tracer of a server. `endpoint`: None for no traces; `name`: tells this server from others. Raises
    ConfigError as `traces_wanted` does."""
    variables = traces_wanted(endpoint, environ)
    if endpoint is None or variables is None:
        yield NO_TRACES
        return
    attributes = {"service.version": __version__, "service.instance.id": name}
    sender = Sender(ExportSettings(endpoint, attributes, variables.protocol, log_format), environ)
    await sender.start()
    try:
        yield RecordingTracer(sender.take, sampling=variables.sampling)
    finally:
        await sender.close()


class Sender:
    """The process that sends spans, and those that it has not got yet. Used on one event loop."""

    def __init__(
        self, order: ExportSettings, environ: Mapping[str, str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`environ`: the environment of the process."""
        self._order = order
        self._environ = DEFAULTS | dict(environ)
        self._clock = clock
        self._records: list[SpanRecord] = []
        """The spans that have ended. They become bytes together: one at a time, amid other work, that takes longer."""
        self._encoder = msgspec.msgpack.Encoder()
        self._timer: asyncio.TimerHandle | None = None
        self.process: Process | None = None
        self._starting: asyncio.Task[None] | None = None
        self._started_s = 0.0
        self.num_dropped = 0

    async def start(self) -> None:
        self._started_s = self._clock()
        try:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", PROGRAM),
                stdin=PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                env=self._environ,
            )
        except OSError as error:
            logger.warning("the process that sends traces cannot be started: %s", error)
            return
        self._write(self._frame(self._order))

    async def started(self) -> None:
        """Returns once a process that is being started again is there."""
        if self._starting is not None:
            await asyncio.wait([self._starting])

    def take(self, record: SpanRecord) -> None:
        self._records.append(record)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HAND_OVER_S, self.hand_over)

    async def close(self) -> None:
        """Hands over what is left, and ends the process within `CLOSE_S`."""
        if self._timer is not None:
            self._timer.cancel()
        await self.started()
        self.hand_over(last=True)
        process, self.process = self.process, None
        if process is None:
            return
        assert process.stdin is not None  # it was asked for
        process.stdin.close()
        try:
            async with asyncio.timeout(CLOSE_S + 1):
                await process.wait()
        except TimeoutError:
            logger.warning("the process that sends traces has not ended in time: its last spans are lost")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def hand_over(self, *, last: bool = False) -> None:
        """Writes the spans that have ended to the process, or drops them. `last`: the server ends."""
        self._timer = None
        records, self._records = self._records, []
        if records and not self._write(self._frame(records)):
            self.num_dropped += len(records)
            logger.warning(
                "spans are dropped, since the process that sends them does not take them",
                extra={"fields": {"spans": self.num_dropped}, **ONCE_A_MINUTE},
            )
            if not last:
                self._start_again()

    def _frame(self, content: ExportSettings | list[SpanRecord]) -> bytes:
        payload = self._encoder.encode(content)
        return LENGTH.pack(len(payload)) + payload

    def _write(self, data: bytes) -> bool:
        """Returns False if the process is gone, or has too much to read already."""
        process = self.process
        if process is None or process.returncode is not None or process.stdin is None:
            return False
        if process.stdin.is_closing() or process.stdin.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            return False
        process.stdin.write(data)
        return True

    def _start_again(self) -> None:
        """Starts the process again if it has ended, now and then."""
        ended = self.process is None or self.process.returncode is not None
        if ended and self._starting is None and self._clock() >= self._started_s + START_AGAIN_S:
            self._starting = asyncio.create_task(self.start())
            self._starting.add_done_callback(self._has_started)

    def _has_started(self, _: asyncio.Task[None]) -> None:
        self._starting = None
