"""`motet ray`: a cell of any size on Ray Serve, until a signal ends it."""

import importlib.util
from collections.abc import Callable
from typing import Annotated

import typer

from motet.cli.options import given, takes
from motet.cli.start import ConfigFile, StopWithStdin, print_settings
from motet.config import environment
from motet.deploy.ready import ray_ready_line
from motet.deploy.resolved import parser_names
from motet.errors import ConfigError
from motet.log import setup_logging_as
from motet.settings import Settings, resolve_settings
from motet.settings.record import RAY

NEEDS_RAY = "motet ray needs Ray Serve: pip install '.[ray]' in Motet's folder"


@takes(
    RAY,
    prefill="Prefill replicas, with --autoscale the most there may be; 0: decode replicas do it all. (default 0)",
    decode="Decode replicas, with --autoscale the most there may be. (default 1)",
    num_threads="CPU threads of an engine; if unset, as many as --cpus-per-worker.",
    side_channel_host="Address at which other nodes reach this one; if unset, the one that Ray knows.",
    cluster_key="Replicas with another key are refused; if unset, one is drawn.",
    drain_timeout_s="Seconds that answers under way have when a replica stops. (default 30)",
    host="Address that Serve listens on. (default 127.0.0.1)",
    port="Port that Serve listens on. (default 8000)",
)
def ray(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="A folder, a hub name, or smollm2 (the default).", show_default=False, metavar="MODEL"),
    ] = None,
    *,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print a config for `serve deploy`, without keys, and start nothing.")
    ] = False,
    config: ConfigFile = None,
    stop_with_stdin: StopWithStdin = False,
    **_flags: object,
) -> None:
    """Serve MODEL with prefill and decode replicas on Ray Serve: on the cluster there is, or a local one.

    Every flag may also be given as MOTET_<NAME> in the environment, or in a TOML file.
    """
    settings = resolve_settings(given(ctx), environ=environment(), file=config, names=RAY)
    parser_names(settings)  # before anything starts
    check_extra()
    if print_config:
        from motet.deploy.ray.serve_config import serve_config

        typer.echo(serve_config(settings), nl=False)
        return
    raise typer.Exit(_run(settings, stop_with_stdin=stop_with_stdin))


def check_extra(find: Callable[[str], object | None] = importlib.util.find_spec) -> None:
    """Raises ConfigError if Ray is not installed."""
    if find("ray") is None:
        raise ConfigError(NEEDS_RAY)


def _run(settings: Settings, *, stop_with_stdin: bool) -> int:
    # Only here: the other commands start without Ray, and quicker.
    from motet.deploy.ray.foreground import Stopping, run_application

    print_settings(settings, "motet ray")
    server = settings.server(served_model_name=settings.model.served_model_name or settings.model.model)
    setup_logging_as(server.log_format, server.log_level)
    stopping = Stopping()
    if stop_with_stdin:
        stopping.watch_stdin()
    return run_application(
        settings,
        settings.chosen(),
        on_ready=lambda url, replicas: typer.echo(ray_ready_line(server.served_model_name, url, replicas)),
        stopping=stopping,
    )
