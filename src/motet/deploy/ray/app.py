"""The application: its deployments, their numbers of replicas, and the arguments of each replica.

    gateway ingress:   gateway ─► (directory, decode, prefill)
    direct ingress:    decode ─► (directory, prefill)

A Serve config names `application` as `import_path: motet.deploy.ray.app:application`, with settings as `args`."""

import secrets
from collections.abc import Mapping

from ray import serve
from ray.serve import Application

from motet.deploy.ray import options
from motet.deploy.ray.deployments import DirectReplica, GatewayReplica, WorkerReplica
from motet.deploy.ray.directory import DirectoryReplica
from motet.deploy.server_plan import CLUSTER_KEY_BYTES, parser_names
from motet.settings.declaration import ServerCommand
from motet.settings.ray_config import Ingress
from motet.settings.resolve import resolve_settings
from motet.settings.server_config import environment
from motet.types import Role


def application(args: Mapping[str, object]) -> Application:
    """Builds the application for these settings of `motet ray`. Raises ConfigError."""
    options.check_arguments(args)
    settings = resolve_settings(args, environ=environment(), command=ServerCommand.RAY)
    parser_names(settings)  # checked here, so that not every replica fails at its start
    if not settings.rows["cluster_key"].value:
        args = {**args, "cluster_key": secrets.token_hex(CLUSTER_KEY_BYTES)}
    options.check_trainers(settings)
    by_name = options.deployment_options(settings)
    by_name[options.DECODE].update(options.request_router_options(settings, environment()))
    directory = serve.deployment(**by_name[options.DIRECTORY])(DirectoryReplica).bind()
    prefill = None
    if options.PREFILL in by_name:
        prefill = serve.deployment(**by_name[options.PREFILL])(WorkerReplica).bind(args, directory, role=Role.PREFILL)
    if settings.ray.ingress is Ingress.DIRECT:
        return serve.deployment(**by_name[options.DECODE])(DirectReplica).bind(args, directory, prefill=prefill)
    decode = serve.deployment(**by_name[options.DECODE])(WorkerReplica).bind(args, directory)
    gateway = serve.deployment(**by_name[options.GATEWAY])(GatewayReplica)
    return gateway.bind(args, directory, decode=decode, prefill=prefill)
