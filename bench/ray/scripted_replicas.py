"""Replicas of Motet on Ray Serve with scripted engines (`bench.frontend.scripted_engine`) instead of engine
processes."""

from collections.abc import Mapping
from functools import cache

from ray import serve
from ray.serve import Application

from bench.client.fresh_prompts import TEXT
from bench.frontend.scripted_engine import Pulse, PulsedEngine
from motet.deploy.ray.deployments import DirectReplica, GatewayReplica, WorkerReplica
from motet.deploy.ray.directory import DirectoryReplica
from motet.deploy.ray.options import DECODE, DIRECTORY, GATEWAY, deployment_options
from motet.models.model_source import resolve
from motet.settings.declaration import ServerCommand
from motet.settings.engine_config import EngineConfig
from motet.settings.ray_config import Ingress
from motet.settings.resolve import resolve_settings
from motet.settings.server_config import cache_folder, environment
from motet.text.tokenizer import Tokenizer

MODEL = "smollm2"


@cache
def scripted() -> PulsedEngine:
    """Returns the only engine of this process."""
    folder = resolve(MODEL, cache=cache_folder(environment()))
    return PulsedEngine(Tokenizer.load(folder).encode(TEXT), Pulse())


async def start_scripted(config: EngineConfig) -> PulsedEngine:
    return scripted()


class PulsedDecode(WorkerReplica):
    start_engine = staticmethod(start_scripted)


class PulsedDirect(DirectReplica):
    start_engine = staticmethod(start_scripted)


def application(args: Mapping[str, object]) -> Application:
    """Builds the application of `motet.deploy.ray.app.application`, with scripted decode replicas and no prefill
    replicas."""
    settings = resolve_settings(args, environ={}, command=ServerCommand.RAY)
    options = deployment_options(settings)
    directory = serve.deployment(**options[DIRECTORY])(DirectoryReplica).bind()
    if settings.ray.ingress is Ingress.DIRECT:
        return serve.deployment(**options[DECODE])(PulsedDirect).bind(args, directory)
    decode = serve.deployment(**options[DECODE])(PulsedDecode).bind(args, directory)
    return serve.deployment(**options[GATEWAY])(GatewayReplica).bind(args, directory, decode=decode)
