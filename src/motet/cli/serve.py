"""`motet serve`: resolves the settings, finds the model, and runs a server until a signal ends it."""

from typing import Annotated

import typer

from motet.cli.options import given, takes
from motet.cli.start import ConfigFile, StopWithStdin, print_settings, run_until_stopped, say
from motet.config import cache_folder, environment
from motet.deploy.cell import Cell
from motet.deploy.heap import freeze_heap
from motet.deploy.ready import ready_line
from motet.deploy.resolved import server_plan
from motet.deploy.server import Outcome, run_server
from motet.deploy.serving import Serving
from motet.deploy.stop import StopSignals
from motet.engines.native.client import NativeEngine
from motet.settings import resolve_settings
from motet.settings.record import SERVE


@takes(SERVE)
def serve(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="A folder, a hub name, or smollm2 (the default).", show_default=False, metavar="MODEL"),
    ] = None,
    *,
    config: ConfigFile = None,
    stop_with_stdin: StopWithStdin = False,
    **_flags: object,
) -> None:
    """Serve MODEL over the OpenAI API.

    Every flag may also be given as MOTET_<NAME> in the environment, or in a TOML file.
    """
    settings = resolve_settings(given(ctx), environ=environment(), file=config)
    plan = server_plan(settings, cache=cache_folder(environment()), say=say)
    print_settings(settings, "motet serve")

    async def run(signals: StopSignals) -> Outcome:
        return await run_server(plan, start_engine=NativeEngine.start, on_ready=on_ready, signals=signals)

    raise run_until_stopped(run, plan.server, stop_with_stdin=stop_with_stdin)


def on_ready(serving: Serving[Cell]) -> None:
    freeze_heap()
    typer.echo(ready_line(serving.url, [worker for worker in serving.workforce.workers if worker.local]))
