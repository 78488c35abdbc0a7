"""Passes spans to the process that sends them (`tracing.export`), which lives as long as the server.

    RecordingTracer ─► `Sender.take` ─► every 0.2 s all spans as one frame ─► standard input of the process ─► collector

The server never waits for the process: spans that it does not read in time are dropped, and their number is logged. If
it ends, another one is started. When the server ends, it has `CLOSE_S` to send the remaining spans."""

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
"""Variables of OpenTelemetry whose own defaults are for less traffic: milliseconds between two batches, and the maximum
number of spans that wait for one."""
FRAME_PERIOD_S = 0.2
"""Time between two frames, while there are spans."""
MAX_UNREAD_BYTES = 8 * 2**20
"""Maximum size of spans that the process has not read so far; further spans are dropped."""
MIN_RESTART_INTERVAL_S = 10.0
"""Minimum time between two starts of the process."""
CLOSE_S = 3.0
"""Time that the process has to send its last spans."""

LENGTH = struct.Struct(">I")
"""Header of each frame: the number of bytes of msgpack that follow."""


class ExportSettings(msgspec.Struct, frozen=True):
    """The first frame that the process reads."""

    endpoint: str
    """URL of the collector."""
    attributes: dict[str, str]
    """Attributes of all spans: the resource, in OpenTelemetry's terms."""
    protocol: Protocol = Protocol.HTTP
    log_format: str = LogFormat.TEXT
    close_s: float = CLOSE_S


def trace_variables(
    endpoint: str | None, environ: Mapping[str, str], *, find: Callable[[str], object] = version
) -> Variables | None:
    """Reads OpenTelemetry's variables; None without traces. Raises ConfigError for a wrong one or a missing package."""
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
    """Yields the tracer of server `name`. `endpoint`: None for no traces. Raises the errors of `trace_variables`."""
    variables = trace_variables(endpoint, environ)
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
    """The process that sends spans, and the spans that have not been passed to it. Belongs to one event loop."""

    def __init__(
        self, settings: ExportSettings, environ: Mapping[str, str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`environ`: the environment of the process."""
        self._settings = settings
        self._environ = DEFAULTS | dict(environ)
        self._clock = clock
        self._records: list[SpanRecord] = []
        """Spans that have ended. They are encoded together, which is faster than one at a time between other work."""
        self._encoder = msgspec.msgpack.Encoder()
        self._timer: asyncio.TimerHandle | None = None
        self.process: Process | None = None
        self._starting: asyncio.Task[None] | None = None
        """The last restart."""
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
                start_new_session=True,  # a terminal sends Ctrl-C to all processes of a session
            )
        except OSError as error:
            logger.warning("the process that sends traces cannot be started: %s", error)
            return
        self._write(self._frame(self._settings))

    async def started(self) -> None:
        """Waits until a restart has finished, if one is in progress."""
        if self._starting is not None:
            await asyncio.wait([self._starting])

    def take(self, record: SpanRecord) -> None:
        self._records.append(record)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FRAME_PERIOD_S, self.flush)

    async def close(self) -> None:
        """Passes on the remaining spans, and ends the process within `CLOSE_S`."""
        if self._timer is not None:
            self._timer.cancel()
        await self.started()
        self.flush(last=True)
        process, self.process = self.process, None
        if process is None:
            return
        assert process.stdin is not None  # it was requested
        process.stdin.close()
        try:
            async with asyncio.timeout(CLOSE_S + 1):
                await process.wait()
        except TimeoutError:
            logger.warning("the process that sends traces has not ended in time: its last spans are lost")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def flush(self, *, last: bool = False) -> None:
        """Writes the spans that have ended to the process, or drops them. `last`: True if the server ends."""
        self._timer = None
        records, self._records = self._records, []
        if records and not self._write(self._frame(records)):
            self.num_dropped += len(records)
            logger.warning(
                "spans are dropped, because the process that sends them does not read them",
                extra={"fields": {"spans": self.num_dropped}, **ONCE_A_MINUTE},
            )
            if not last:
                self._restart()

    def _frame(self, content: ExportSettings | list[SpanRecord]) -> bytes:
        payload = self._encoder.encode(content)
        return LENGTH.pack(len(payload)) + payload

    def _write(self, data: bytes) -> bool:
        """Returns False if the process has ended, or has too much unread data."""
        process = self.process
        if process is None or process.returncode is not None or process.stdin is None:
            return False
        if process.stdin.is_closing() or process.stdin.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            return False
        process.stdin.write(data)
        return True

    def _restart(self) -> None:
        """Restarts the process if it has ended, at most once in `MIN_RESTART_INTERVAL_S`."""
        ended = self.process is None or self.process.returncode is not None
        starting = self._starting is not None and not self._starting.done()
        if ended and not starting and self._clock() >= self._started_s + MIN_RESTART_INTERVAL_S:
            self._starting = asyncio.create_task(self.start())
