"""`motet gateway`: one API in front of servers elsewhere, until a signal ends it."""

from functools import partial

import typer

from motet.cli.options import given, takes
from motet.cli.start import ConfigFile, StopWithStdin, print_settings, run_until_stopped, say
from motet.config import cache_folder, environment
from motet.deploy.gateway import Gateway
from motet.deploy.gateway_server import GatewayPlan, run_gateway
from motet.deploy.heap import freeze_heap
from motet.deploy.ready import gateway_ready_line
from motet.deploy.resolved import parser_names, read_template
from motet.deploy.server import Outcome
from motet.deploy.serving import Serving
from motet.deploy.stop import StopSignals
from motet.deploy.tokenizers import TokenizerRules
from motet.models import resolve_tokenizer
from motet.settings import Settings, resolve_settings
from motet.settings.record import GATEWAY


@takes(
    GATEWAY,
    served_model_name="The name clients use for the first model, in place of the workers'.",
    tokenizer="Folder or hub name of a tokenizer for models without one of their own.",
)
def gateway(
    ctx: typer.Context,
    *,
    config: ConfigFile = None,
    stop_with_stdin: StopWithStdin = False,
    **_flags: object,
) -> None:
    """Serve the OpenAI API in front of other servers, the workers: Motet's, vLLM's, or any with an API like OpenAI's.

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
    cache = cache_folder(environment())
    named = (text.partition("=") for text in settings.gateway.tokenizer_of)
    return GatewayPlan(
        settings.gateway,
        settings.server(served_model_name=model.served_model_name or ""),
        tokenizers=TokenizerRules(
            {name: resolve_tokenizer(folder, cache=cache, say=say) for name, _, folder in named},
            others=None if model.tokenizer is None else resolve_tokenizer(model.tokenizer, cache=cache, say=say),
            chat_template=read_template(model.chat_template),
            parsers=parser_names(settings),
        ),
        find_tokenizer=partial(resolve_tokenizer, cache=cache),
        routing=settings.routing,
        cell=settings.cell,
    )


def on_ready(serving: Serving[Gateway]) -> None:
    freeze_heap()
    typer.echo(gateway_ready_line(serving.url, serving.service.model_names, serving.service.workers.reports()))
