"""What the commands that run a server have in common: what they read, what they show, and how they end."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from motet.cli.options import PROCESS
from motet.config import ServerConfig
from motet.deploy.server import Outcome
from motet.deploy.stop import StopSignals
from motet.log import setup_logging_as
from motet.settings import Settings

ConfigFile = Annotated[
    Path | None,
    typer.Option(help="TOML file with settings (max_num_seqs = 64).", rich_help_panel=PROCESS, show_default=False),
]
StopWithStdin = Annotated[
    bool, typer.Option(hidden=True, help="End when standard input ends: for programs that start a server.")
]


def run_until_stopped(
    run: Callable[[StopSignals], Awaitable[Outcome]], config: ServerConfig, *, stop_with_stdin: bool
) -> typer.Exit:
    """Runs a server in a loop of its own; what it ended with is to be raised."""
    setup_logging_as(config.log_format, config.log_level)

    async def run_with_signals() -> Outcome:
        with StopSignals() as signals:
            if stop_with_stdin:
                signals.watch_stdin(sys.stdin)
            return await run(signals)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return typer.Exit(runner.run(run_with_signals()))


def say(line: str) -> None:
    typer.echo(line, err=True)


def print_settings(settings: Settings, command: str) -> None:
    """The table of all settings, on standard error, so that standard output has the ready line alone."""
    table = Table("setting", "value", "from", title=command, title_justify="left", box=None, pad_edge=False)
    for row in settings.rows.values():
        table.add_row(row.name, row.shown, row.source, style="dim" if row.is_default else "bold")
    Console(stderr=True).print(table, markup=False)
