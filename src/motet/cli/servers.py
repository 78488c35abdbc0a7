"""The commands that run a server until a signal ends it: `motet serve`, `motet gateway`, `motet ray`.

Each has one flag per setting, made from the declarations in `motet.settings`."""

import asyncio
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from motet.deploy.cell import Cell
from motet.deploy.gateway import Gateway
from motet.deploy.server import Outcome, Serving, favour_streams, run_gateway, run_server
from motet.deploy.server_plan import gateway_plan, parser_names, server_config, server_plan
from motet.deploy.shutdown import StopSignals, gateway_ready_line, ray_ready_line, ready_line
from motet.engines.native.client import NativeEngine
from motet.errors import ConfigError
from motet.log import setup_logging
from motet.settings.declaration import Declaration, Panel, ServerCommand
from motet.settings.record import Settings
from motet.settings.resolve import resolve_settings
from motet.settings.server_config import SETTINGS, cache_folder, environment
from motet.tracing.sender import trace_variables

EVERY_FLAG = "Every flag can also be set as MOTET_<NAME> in the environment or in a TOML file."

Run = Callable[..., int]
"""Runs a server until it ends, as `run(settings, stop_with_stdin=...)`, and returns the exit code."""
Model = Annotated[
    str | None,
    typer.Argument(
        help="Local folder, Hugging Face model (org/name), or smollm2 (default).", show_default=False, metavar="MODEL"
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="TOML file with settings (max_num_seqs = 64).",
        rich_help_panel=Panel.PROCESS,
        show_default=False,
    ),
]
StopWithStdin = Annotated[
    bool, typer.Option(hidden=True, help="End when standard input ends: for programs that start a server.")
]


class ServerHelp(TyperCommand):
    """A command whose `--help` lists its flags by panel in plain text: rich's columns would truncate long flags."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.rich_markup_mode = None

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                other = "Arguments" if param.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(param, "rich_help_panel", None) or other, []).append(record)
        for name, records in panels.items():
            with formatter.section(name):
                formatter.write_dl(records)


def server_command(command: ServerCommand) -> Callable[[Run], Callable[..., None]]:
    """Returns a decorator that makes a command of a `Run`, with a flag for each setting and the flags of the `Run`."""
    settings = [setting for setting in SETTINGS.values() if command in setting.commands and setting.name != "model"]
    flags = [flag_parameter(setting) for panel in Panel for setting in settings if setting.panel is panel]

    def make(run: Run) -> Callable[..., None]:
        def function(
            model: Model = None, *, config: ConfigFile = None, stop_with_stdin: StopWithStdin = False, **flags: object
        ) -> None:
            own = {name: value for name, value in flags.items() if name not in SETTINGS}
            chosen = typed({"model": model, **flags})
            settings = resolve_settings(chosen, environ=environment(), file=config, command=command)
            trace_variables(settings.server().otlp_endpoint, environment())
            raise typer.Exit(run(settings, stop_with_stdin=stop_with_stdin, **own))

        common, own = inspect.signature(function).parameters, inspect.signature(run).parameters
        function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                *([common["model"]] if command in SETTINGS["model"].commands else []),
                *flags,
                *(flag for name, flag in own.items() if name not in ("settings", "stop_with_stdin")),
                common["config"],
                common["stop_with_stdin"],
            ]
        )
        function.__name__, function.__doc__ = run.__name__, f"{inspect.getdoc(run)}\n\n{EVERY_FLAG}"
        return function

    return make


def flag_parameter(declared: Declaration) -> inspect.Parameter:
    """Returns the flag of a setting. Its default is None, so that only a given flag overrides file and environment."""
    off, on = declared.flag, declared.flag_for(True)
    option = typer.Option(
        off if off == on else f"{on}/{off}",
        metavar=None if declared.kind is bool else declared.placeholder,
        help=declared.full_help,
        rich_help_panel=declared.panel,
        show_default=False,
    )
    return inspect.Parameter(
        declared.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[declared.flag_kind | None, option],
    )


def typed(flags: Mapping[str, object]) -> dict[str, object]:
    """Returns the settings that were given on the command line. Typer passes an empty list for an absent list flag."""
    return {name: value for name, value in flags.items() if name in SETTINGS and value not in (None, [], ())}


@server_command(ServerCommand.SERVE)
def serve(settings: Settings, *, stop_with_stdin: bool) -> int:
    """Serve MODEL over the OpenAI API."""
    plan = server_plan(settings, cache=cache_folder(environment()), say=say)

    def on_ready(serving: Serving[Cell]) -> None:
        favour_streams()
        typer.echo(ready_line(serving.url, [worker for worker in serving.workforce.workers if worker.local]))

    run = partial(run_server, plan, start_engine=NativeEngine.start, on_ready=on_ready)
    return run_until_stopped(run, settings, command="motet serve", stop_with_stdin=stop_with_stdin)


@server_command(ServerCommand.GATEWAY)
def gateway(settings: Settings, *, stop_with_stdin: bool) -> int:
    """Serve the OpenAI API in front of other servers, its workers: Motet servers, vLLM servers, or any server with an
    OpenAI-compatible API."""
    plan = gateway_plan(settings, cache=cache_folder(environment()), say=say)

    def on_ready(serving: Serving[Gateway]) -> None:
        favour_streams()
        service = serving.service
        typer.echo(gateway_ready_line(serving.url, service.model_names, workers=service.workers()))

    run = partial(run_gateway, plan, on_ready=on_ready)
    return run_until_stopped(run, settings, command="motet gateway", stop_with_stdin=stop_with_stdin)


@server_command(ServerCommand.RAY)
def ray(
    settings: Settings,
    *,
    stop_with_stdin: bool,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print a config for `serve deploy`, without keys, and start nothing.")
    ] = False,
) -> int:
    """Serve MODEL with prefill and decode replicas on Ray Serve: on the running cluster, or on a local one."""
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


def check_extra(find: Callable[[str], object | None] = importlib.util.find_spec) -> None:
    """Raises ConfigError if Ray is not installed."""
    if find("ray") is None:
        raise ConfigError("motet ray needs Ray Serve: run pip install '.[ray]' in Motet's folder")


def run_until_stopped(
    run: Callable[..., Awaitable[Outcome]], settings: Settings, *, command: str, stop_with_stdin: bool
) -> Outcome:
    """Runs a server, as `run(signals=...)`, in a new event loop."""
    print_settings(settings, command)
    config = settings.server()
    setup_logging(format=config.log_format, level=config.log_level)

    async def run_with_signals() -> Outcome:
        with StopSignals() as signals:
            if stop_with_stdin:
                signals.watch_stdin(sys.stdin)
            return await run(signals=signals)

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


def say(line: str) -> None:
    """Prints a progress line on standard error."""
    typer.echo(line, err=True)
