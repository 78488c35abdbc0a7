"""Runs a server until a signal ends it: `motet serve`, `motet gateway`, `motet ray` with resolved settings."""

import asyncio
import importlib.util
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import cast

import typer
from rich.console import Console
from rich.table import Table

from motet.cli.help import wants_color
from motet.cli.interrupts import end_at_interrupts
from motet.deploy.cell import Cell
from motet.deploy.gateway import Gateway
from motet.deploy.server import Outcome, Serving, favour_streams, run_gateway, run_server
from motet.deploy.server_plan import gateway_plan, parser_names, server_config, server_plan
from motet.deploy.shutdown import StopSignals, gateway_ready_line, ray_ready_line, ready_line
from motet.engines.native.client import NativeEngine
from motet.errors import ConfigError
from motet.log import notice, setup_logging
from motet.settings.record import Settings
from motet.settings.server_config import cache_folder, environment
from motet.tracing.sender import trace_variables


def serve(settings: Settings, *, stop_with_stdin: bool) -> int:
    """Runs a server with its own engines."""
    prepare(settings)
    plan = server_plan(settings, cache=cache_folder(environment()), say=notice)

    def on_ready(serving: Serving[Cell]) -> None:
        favour_streams()
        typer.echo(ready_line(serving.url, [worker for worker in serving.workforce.workers if worker.local]))

    run = partial(run_server, plan, start_engine=NativeEngine.start, on_ready=on_ready)
    return run_until_stopped(run, settings, command="motet serve", stop_with_stdin=stop_with_stdin)


def gateway(settings: Settings, *, stop_with_stdin: bool) -> int:
    """Runs a gateway."""
    prepare(settings)
    plan = gateway_plan(settings, cache=cache_folder(environment()), say=notice)

    def on_ready(serving: Serving[Gateway]) -> None:
        favour_streams()
        service = serving.service
        typer.echo(gateway_ready_line(serving.url, service.model_names, workers=service.workers()))

    run = partial(run_gateway, plan, on_ready=on_ready)
    return run_until_stopped(run, settings, command="motet gateway", stop_with_stdin=stop_with_stdin)


def ray(settings: Settings, *, stop_with_stdin: bool, print_config: bool = False) -> int:
    """Runs a cell on Ray Serve, or prints its config."""
    prepare(settings)
    parser_names(settings)  # before anything starts
    check_extra()
    if print_config:
        from motet.deploy.ray.options import serve_config

        typer.echo(serve_config(settings), nl=False)
        return 0
    # Imported here so that the other commands start faster, and without Ray.
    from motet.deploy.ray.foreground import run_application

    def on_ready(url: str, replicas: Mapping[str, int]) -> None:
        typer.echo(ray_ready_line(server_config(settings).served_model_name, url, replicas=replicas))

    run = partial(run_application, settings, settings.chosen(), on_ready=on_ready)
    return run_until_stopped(run, settings, command="motet ray", stop_with_stdin=stop_with_stdin)


def prepare(settings: Settings) -> None:
    """Sets up logging as the settings say. Raises ConfigError if traces cannot be sent."""
    config = settings.server()
    setup_logging(format=config.log_format, level=config.log_level, color=wants_color())
    trace_variables(config.otlp_endpoint, environment())


def check_extra(find: Callable[[str], object | None] = importlib.util.find_spec) -> None:
    """Raises ConfigError if Ray is not installed."""
    if find("ray") is None:
        raise ConfigError("motet ray needs Ray Serve: run pip install '.[ray]' in Motet's folder")


def run_until_stopped(
    run: Callable[..., Awaitable[Outcome]], settings: Settings, *, command: str, stop_with_stdin: bool
) -> Outcome:
    """Runs a server, as `run(signals=...)`, in a new event loop."""
    print_settings(settings, command)

    async def run_with_signals() -> Outcome:
        with StopSignals() as signals:
            if stop_with_stdin:
                signals.watch_stdin(sys.stdin)
            outcome = await run(signals=signals)
        end_at_interrupts()
        return outcome

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(run_with_signals())


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Returns uvloop's event loop, or asyncio's own where uvloop does not exist (Windows): a stream then costs more."""
    try:
        return cast(asyncio.AbstractEventLoop, importlib.import_module("uvloop").new_event_loop())
    except ImportError:
        return asyncio.new_event_loop()


def print_settings(settings: Settings, command: str) -> None:
    """Prints all settings with their sources on standard error. Standard output has only the ready line."""
    table = Table("setting", "value", "from", title=command, title_justify="left", box=None, pad_edge=False)
    for row in settings.rows.values():
        table.add_row(row.name, row.shown, row.source, style="dim" if row.is_default else "bold")
    Console(stderr=True).print(table, markup=False)
