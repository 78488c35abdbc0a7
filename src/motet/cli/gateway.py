"""`motet gateway`: one API in front of servers elsewhere, until a signal ends it."""

from pathlib import Path

import typer

from motet.cli.options import given, takes
from motet.cli.start import ConfigFile, StopWithStdin, print_settings, read_template, run_until_stopped, say
from motet.config import cache_folder, environment
from motet.deploy.gateway import Gateway
from motet.deploy.gateway_server import GatewayPlan, run_gateway
from motet.deploy.heap import freeze_heap
from motet.deploy.ready import gateway_ready_line
from motet.deploy.server import Outcome
from motet.deploy.stop import StopSignals
from motet.models import resolve_tokenizer
from motet.settings import Settings, resolve_settings
from motet.settings.record import GATEWAY


@takes(GATEWAY, served_model_name="The name clients use, in place of the workers'.")
def gateway(
    ctx: typer.Context,
    *,
    config: ConfigFile = None,
    stop_with_stdin: StopWithStdin = False,
    **_flags: object,
) -> None:
    """Serve the OpenAI API in front of `motet serve` servers, the workers.

    Every flag may also be given as MOTET_<NAME> in the environment, or in a TOML file.
    """
    settings = resolve_settings(given(ctx), environ=environment(), file=config, names=GATEWAY)
    plan = make_plan(settings)
    print_settings(settings, "motet gateway")

    async def run(signals: StopSignals) -> Outcome:
        return await run_gateway(plan, on_ready=on_ready, signals=signals)

    raise run_until_stopped(run, plan.server, stop_with_stdin=stop_with_stdin)


def make_plan(settings: Settings) -> GatewayPlan:
    model = settings.model
    return GatewayPlan(
        settings.gateway,
        settings.server(served_model_name=model.served_model_name or ""),
        tokenizer_path=find_tokenizer(model.tokenizer),
        chat_template=read_template(model.chat_template),
        routing=settings.routing,
        cell=settings.cell,
    )


def find_tokenizer(named: str | None) -> Path | None:
    """None: the workers' own."""
    return None if named is None else resolve_tokenizer(named, cache=cache_folder(environment()), say=say)


def on_ready(url: str, model: str, gateway: Gateway) -> None:
    freeze_heap()
    typer.echo(gateway_ready_line(url, model, gateway.workers))
