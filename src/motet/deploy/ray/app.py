"""The application: which deployments there are, how many replicas each has, and what each replica is given.

    gateway:   gateway ─► (directory, decode, prefill)
    direct:    decode ─► (directory, prefill)        with --prefix-router beside it: router ─► (directory, decode)

`application` is what a Serve config names as `import_path: motet.deploy.ray.app:application`, with settings as `args`.
"""

import secrets
from collections.abc import Mapping

import ray
from ray import serve
from ray.serve import Application

from motet.config import environment
from motet.deploy.plan import CLUSTER_KEY_BYTES
from motet.deploy.ray.deployments import DecodeReplica, DirectReplica, GatewayReplica, PrefillReplica
from motet.deploy.ray.direct_ingress import check_hook, router_options
from motet.deploy.ray.directory_replica import DirectoryReplica
from motet.deploy.ray.ingress_hook import with_prefix_router
from motet.deploy.ray.options import DECODE, DIRECTORY, GATEWAY, PREFILL, deployment_options
from motet.deploy.ray.replica_plans import engine_key
from motet.deploy.ray.serve_config import check_arguments
from motet.deploy.resolved import parser_names
from motet.settings import resolve_settings
from motet.settings.record import RAY
from motet.types import Ingress


def application(args: Mapping[str, object]) -> Application:
    """`args`: settings of `motet ray` by name. Raises ConfigError."""
    check_arguments(args)
    settings = resolve_settings(args, environ=environment(), names=RAY)
    parser_names(settings)  # here, and not in each replica that would not start
    if not engine_key(settings):
        args = {**args, "cluster_key": secrets.token_hex(CLUSTER_KEY_BYTES)}
    check_hook(settings, environment(), ray_version=ray.__version__)
    options = deployment_options(settings)
    options[DECODE].update(router_options(settings, environment()))
    directory = serve.deployment(**options[DIRECTORY])(DirectoryReplica).bind()
    prefill = []
    if PREFILL in options:
        prefill.append(serve.deployment(**options[PREFILL])(PrefillReplica).bind(args, directory))
    if settings.ray.ingress is Ingress.DIRECT:
        direct = serve.deployment(**options[DECODE])(DirectReplica).bind(args, directory, *prefill)
        return with_prefix_router(direct, args, directory) if settings.ray.prefix_router else direct
    decode = serve.deployment(**options[DECODE])(DecodeReplica).bind(args, directory)
    return serve.deployment(**options[GATEWAY])(GatewayReplica).bind(args, directory, decode, *prefill)
