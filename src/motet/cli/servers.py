"""Runs a server until a signal ends it: `motet serve`, `motet gateway`, `motet ray` with resolved settings."""

import asyncio
import importlib.util
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import cast

import typer

from motet.cli.help import wants_color
from motet.cli.interrupts import end_at_interrupts
from motet.cli.start_lines import Start, cell_lines, gateway_lines, ray_lines
from motet.deploy.cell import Cell
from motet.deploy.gateway import Gateway
from motet.deploy.server import Outcome, Serving, favour_streams, run_gateway, run_server
from motet.deploy.server_plan import gateway_plan, parser_names, server_config, server_plan
from motet.deploy.shutdown import StopSignals, gateway_ready_line, ray_ready_line, ready_line
from motet.engines.native.client import NativeEngine
from motet.errors import ConfigError
from motet.log import LogFormat, notice, setup_logging
from motet.models.progress import Lines, Progress
from motet.models.progress_bars import terminal_progress
from motet.settings.record import Settings
from motet.settings.server_config import ServerConfig, cache_folder, environment
from motet.tracing.sender import trace_variables


def serve(settings: Settings, *, stop_with_stdin: bool) -> int:
    """Runs a server with its own engines."""
    config = prepare(settings)
    plan = server_plan(settings, cache=cache_folder(environment()), progress=progress_of(config))
    with Start(f"loading {config.served_model_name}", settings, command="motet serve") as start:

        def on_ready(serving: Serving[Cell]) -> None:
            favour_streams()
            workers = [worker for worker in serving.workforce.workers if worker.local]
            lines = cell_lines(workers, url=serving.url, config=config)
            start.ready(lines, ready_line(serving.url, workers), url=serving.url)

        run = partial(run_server, plan, start_engine=NativeEngine.start, on_ready=on_ready)
        return run_until_stopped(run, stop_with_stdin=stop_with_stdin)


def gateway(settings: Settings, *, stop_with_stdin: bool) -> int:
    """Runs a gateway."""
    config = prepare(settings)
    plan = gateway_plan(settings, cache=cache_folder(environment()), progress=progress_of(config))
    with Start("waiting for a worker", settings, command="motet gateway") as start:

        def on_ready(serving: Serving[Gateway]) -> None:
            favour_streams()
            models, workers = serving.service.model_names, serving.service.workers()
            lines = gateway_lines(models, workers, url=serving.url, config=config)
            start.ready(lines, gateway_ready_line(serving.url, models, workers=workers), url=serving.url)

        run = partial(run_gateway, plan, on_ready=on_ready)
        return run_until_stopped(run, stop_with_stdin=stop_with_stdin)


def ray(settings: Settings, *, stop_with_stdin: bool, print_config: bool = False) -> int:
    """Runs a cell on Ray Serve, or prints its config."""
    config = prepare(settings)
    parser_names(settings)  # before anything starts
    check_extra()
    if print_config:
        from motet.deploy.ray.options import serve_config

        typer.echo(serve_config(settings), nl=False)
        return 0
    # Imported here so that the other commands start faster, and without Ray.
    from motet.deploy.ray.foreground import run_application

    model = config.served_model_name
    with Start(f"starting replicas with {model} on Ray", settings, command="motet ray") as start:

        def on_ready(url: str, replicas: Mapping[str, int]) -> None:
            lines = ray_lines(model, replicas, url=url, config=config)
            start.ready(lines, ray_ready_line(model, url, replicas=replicas), url=url)

        run = partial(run_application, settings, settings.chosen(), on_ready=on_ready)
        return run_until_stopped(run, stop_with_stdin=stop_with_stdin)


def prepare(settings: Settings) -> ServerConfig:
    """Sets up logging as the settings say, and returns the settings of the HTTP side. Raises ConfigError if traces
    cannot be sent."""
    config = server_config(settings)
    setup_logging(format=config.log_format, level=config.log_level, color=wants_color())
    trace_variables(config.otlp_endpoint, environment())
    return config


def progress_of(config: ServerConfig) -> Progress:
    """Returns bars if the log is text, else lines of the log."""
    shows_bars = config.log_format == LogFormat.TEXT and config.log_level in ("debug", "info")
    return terminal_progress(notice) if shows_bars else Lines(notice)


def check_extra(find: Callable[[str], object | None] = importlib.util.find_spec) -> None:
    """Raises ConfigError if Ray is not installed."""
    if find("ray") is None:
        raise ConfigError("motet ray needs Ray Serve: run pip install '.[ray]' in Motet's folder")


def run_until_stopped(run: Callable[..., Awaitable[Outcome]], *, stop_with_stdin: bool) -> Outcome:
    """Runs a server, as `run(signals=...)`, in a new event loop."""

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
