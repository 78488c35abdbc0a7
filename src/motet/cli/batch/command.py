"""`motet batch`: completes a file of requests on a server of its own or on a running one.

Exit codes: 0, every line has a result; 1, lines have failed, or the run cannot continue; 2, the command or its files
are wrong; 3 to 5, the server cannot start; 130 after Ctrl-C, 143 after SIGTERM. After each of them, the same command
continues with the lines that have no result."""

import asyncio
import contextlib
import inspect
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from motet.batch.concurrency import ConcurrencyLimit
from motet.batch.requests import windows
from motet.batch.rows import params_of
from motet.batch.run import BatchFileRun, BatchProgress, RunTimes
from motet.batch.sender import HttpSender
from motet.batch.server_watch import ServerWatch
from motet.cli.batch.batch_display import duration, show_progress
from motet.cli.batch.files import BatchFiles
from motet.cli.batch.target import CHOSEN_HERE, ServerTarget, server_target
from motet.cli.flags import ConfigFile, given_settings, model_of, setting_flags
from motet.cli.help import HelpAll
from motet.errors import MotetError
from motet.log import notice
from motet.settings.declaration import ServerCommand
from motet.settings.server_config import SETTINGS

DESCRIPTION = """Complete a file of requests, and continue after any interruption.

INPUT has one request in each line, in OpenAI's batch format: custom_id, method, url, body. Results are added to OUTPUT
as they finish, and lines that fail to the file of errors. The same command, started again, sends only what has no
result. This command serves MODEL, with the settings of motet serve; --url names a running server instead."""
SIGNAL_CODE = 128
"""A shell's exit code of a program that a signal has ended, less the number of the signal."""

InputArgument = Annotated[
    Path,
    typer.Argument(
        help="File of requests: JSONL or Parquet, or the folder of a dataset.", show_default=False, metavar="INPUT"
    ),
]
OutputOption = Annotated[
    Path,
    typer.Option(
        "-o",
        "--output",
        metavar="OUTPUT",
        help="JSONL file for results. If INPUT is a table, also a Parquet file or a folder.",
        show_default=False,
    ),
]
BatchModel = Annotated[
    str | None, typer.Argument(help=SETTINGS["model"].full_help, show_default=False, metavar="MODEL")
]


@dataclass(frozen=True)
class BatchOptions:
    concurrency: int | None
    """Fixed number of requests in progress; None to adapt it."""
    server_timeout_s: float
    request_timeout_s: float


def batch(
    input: InputArgument,
    model_argument: BatchModel = None,
    *,
    output: OutputOption,
    errors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSONL file for lines that fail (default: OUTPUT with .errors before its suffix).",
            show_default=False,
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="URL of a running server. Without one, MODEL is served.", show_default=False)
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="API key of the running server (default: the first of MOTET_API_KEYS).", show_default=False),
    ] = None,
    params: Annotated[
        str, typer.Option(metavar="JSON", help="Fields of the bodies of rows and of lines that have only a prompt.")
    ] = "{}",
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Number of requests in progress (default: adapts to the server).", show_default=False),
    ] = None,
    server_timeout: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Maximum time to wait for a server that is away or busy.")
    ] = 600.0,
    request_timeout: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="Maximum time of one request.")
    ] = 3600.0,
    config: ConfigFile = None,
    help_all: HelpAll = False,
    **flags: object,
) -> None:
    options = BatchOptions(concurrency, server_timeout, request_timeout)
    given = given_settings(flags) | model_of(model_argument, flags.get("model"))
    target = server_target(url, given, config=config, api_key=api_key, start_timeout_s=server_timeout)
    with ExitStack() as stack:
        files = BatchFiles.open(input, output, errors=errors, params=params_of(params), stack=stack)
        progress = BatchProgress(files.survey.num_lines, num_before=files.survey.num_finished)
        if files.survey.num_left:
            target.start(progress, stack)
        start_s = time.monotonic()
        try:
            number = asyncio.run(complete(files, progress, target=target, options=options))
        except MotetError:
            if progress.num_completed or progress.num_failed:
                notice(summary(progress, errors=files.errors.path, elapsed_s=time.monotonic() - start_s))
            raise
        files.finish(progress)
    notice(summary(progress, errors=files.errors.path, elapsed_s=time.monotonic() - start_s))
    raise typer.Exit(SIGNAL_CODE + number if number else 1 if progress.num_failed else 0)


def _signature() -> inspect.Signature:
    """Returns the parameters of the command, with a flag for each setting of a server."""
    own = [one for one in inspect.signature(batch).parameters.values() if one.kind is not one.VAR_KEYWORD]
    return inspect.Signature([*own, *setting_flags(ServerCommand.SERVE, without=CHOSEN_HERE)])


batch.__doc__ = DESCRIPTION
batch.__signature__ = _signature()  # type: ignore[attr-defined]


async def complete(files: BatchFiles, progress: BatchProgress, *, target: ServerTarget, options: BatchOptions) -> int:
    """Sends all requests. Returns the number of the signal that stopped the run, or 0."""
    times = RunTimes(server_timeout_s=options.server_timeout_s)
    url = lambda: target.url  # noqa: E731
    async with HttpSender(url, api_key=target.api_key, timeout_s=options.request_timeout_s) as sender:
        watch = ServerWatch(sender, timeout_s=times.server_timeout_s, revive=target.revive)
        limit = ConcurrencyLimit(fixed=options.concurrency)
        run = BatchFileRun(
            sender, watch, output=files.output, errors=files.errors, progress=progress, limit=limit, times=times
        )
        running = asyncio.create_task(run.run(windows(files.lines, files.ids)))
        signals = BatchSignals(run, running, stop_s=times.stop_s)
        showing = asyncio.create_task(show_progress(progress))
        try:
            with signals:
                await running
        except asyncio.CancelledError:
            if not signals.number:
                raise
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)
        return signals.number


class BatchSignals:
    """Lets the first SIGINT or SIGTERM stop a run, and the second one cancel it, while the context is entered."""

    def __init__(self, run: BatchFileRun, task: "asyncio.Task[None]", *, stop_s: float) -> None:
        self.number = 0
        """Number of the first signal; 0 before it."""
        self._run = run
        self._task = task
        self._stop_s = stop_s

    def __enter__(self) -> "BatchSignals":
        with contextlib.suppress(NotImplementedError):  # on Windows, where Ctrl-C cancels at once
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self.receive, number)
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(NotImplementedError):
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().remove_signal_handler(number)

    def receive(self, number: int) -> None:
        if self.number:
            self._task.cancel()
            return
        self.number = number
        self._run.stop()
        if num_open := self._run.progress.num_in_progress:
            notice(f"stopping: waiting up to {self._stop_s:g} s for {num_open} requests; Ctrl-C again stops at once")


def summary(progress: BatchProgress, *, errors: Path, elapsed_s: float) -> str:
    """Returns what a run has done, in one line."""
    failed = f", {progress.num_failed:,} failed ({errors})" if progress.num_failed else ""
    left = f", {progress.num_left:,} not sent" if progress.num_left else ""
    before = f" and {progress.num_before:,} before" if progress.num_before else ""
    rate = progress.num_tokens / max(elapsed_s, 1e-3)
    return (
        f"{progress.num_lines:,} lines: {progress.num_completed:,} completed{before}{failed}{left}, in "
        f"{duration(elapsed_s)} ({rate:,.0f} tokens/s)"
    )
