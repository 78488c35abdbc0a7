"""The application: its deployments, their numbers of replicas, and the arguments of each replica.

    gateway:   gateway ─► (directory, decode, prefill)
    direct:    decode ─► (directory, prefill)        with --prefix-router beside it: router ─► (directory, decode)

`application` is what a Serve config names as `import_path: motet.deploy.ray.app:application`, with settings as `args`.
"""

import secrets
from collections.abc import Mapping

import ray
from ray import serve
from ray.serve import Application

from motet.deploy.ray import options
from motet.deploy.ray.deployments import DirectReplica, GatewayReplica, RouterReplica, WorkerReplica
from motet.deploy.ray.directory import DirectoryReplica
from motet.deploy.server_plan import CLUSTER_KEY_BYTES, parser_names
from motet.settings.declaration import ServerCommand
from motet.settings.resolve import resolve_settings
from motet.settings.server_config import environment
from motet.types import Ingress, Role


def application(args: Mapping[str, object]) -> Application:
    """Makes the application of these settings of `motet ray`. Raises ConfigError."""
    options.check_arguments(args)
    settings = resolve_settings(args, environ=environment(), command=ServerCommand.RAY)
    parser_names(settings)  # checked here, so that not every replica fails at its start
    if not settings.rows["cluster_key"].value:
        args = {**args, "cluster_key": secrets.token_hex(CLUSTER_KEY_BYTES)}
    options.check_trainers(settings)
    options.check_hook(settings, environment(), ray_version=ray.__version__)
    told = options.deployment_options(settings)
    told[options.DECODE].update(options.request_router_options(settings, environment()))
    directory = serve.deployment(**told[options.DIRECTORY])(DirectoryReplica).bind()
    prefill = None
    if options.PREFILL in told:
        prefill = serve.deployment(**told[options.PREFILL])(WorkerReplica).bind(args, directory, role=Role.PREFILL)
    if settings.ray.ingress is Ingress.GATEWAY:
        decode = serve.deployment(**told[options.DECODE])(WorkerReplica).bind(args, directory)
        gateway = serve.deployment(**told[options.GATEWAY])(GatewayReplica)
        return gateway.bind(args, directory, decode=decode, prefill=prefill)
    direct = serve.deployment(**told[options.DECODE])(DirectReplica).bind(args, directory, prefill=prefill)
    if not settings.ray.prefix_router:
        return direct
    router = serve.deployment(**told[options.ROUTER])(RouterReplica).bind(args, directory, decode=direct)
    return direct._with_ingress_request_router(router)  # noqa: SLF001  this is the hook that `RouterReplica` explains
