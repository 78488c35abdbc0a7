"""Serve's options for each deployment of the application, and the application as a config file.

With direct ingress, Serve's proxy chooses the decode replica of a request:

    Serve's own proxy    by session and load (`request_router.ChoicesRouter`)
    HAProxy              the replica with the fewest connections: HAProxy does not use Serve's routers

Nothing here needs Ray, so the command line prints the config without importing it."""

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from motet.deploy.ray.clients import HEALTH_CHECK_S
from motet.deploy.ray.replica_plans import serves_clients, worker_role
from motet.deploy.ray.scaling import CHOICES, PROMPTS, ReplicasByLoad
from motet.errors import ConfigError
from motet.settings.declaration import ServerCommand
from motet.settings.named_worker import resources_by_role
from motet.settings.ray_config import Ingress
from motet.settings.record import Settings
from motet.settings.resolve import known_setting, names_of
from motet.settings.server_config import SETTINGS
from motet.types import Role

logger = logging.getLogger(__name__)

DIRECTORY, PREFILL, DECODE, GATEWAY = "directory", "prefill", "decode", "gateway"

Options = dict[str, Any]
"""Options of one deployment, as `serve.deployment` takes them."""

MANY_REQUESTS = 100_000
"""Maximum number of requests per replica: in practice no limit, since the server in the replica has its own limits."""
SHUTDOWN_MARGIN_S = 15.0
"""Time for engines to end, after the time for answers."""
SHUTDOWN_POLL_S = 0.2
"""Time between two checks by Serve if a replica that is being ended still has requests."""
MIN_HEALTH_CHECK_S, MAX_HEALTH_CHECK_S = HEALTH_CHECK_S, 10.0
"""Limits of the time between two health checks of a replica, with which Serve detects its death."""
MAX_HEALTH_CHECKS_PER_S = 100.0
"""Maximum number of health checks of one deployment per second: Serve's controller is one process."""
LOAD_PERIOD_S = 2.0
"""Time between two load reports of a replica, for scaling."""
LOAD_WINDOW_S = 5.0
"""Time over which the load is averaged, since a single report can fall between two groups."""
LAST_REPLICA_DELAY = 5
"""Factor of the scale-down delay for the last replica: after its end, the next prompt waits for a new engine."""

HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
REQUEST_ROUTER = "motet.deploy.ray.request_router.ChoicesRouter"
ROUTING_STATS_PERIOD_S = 2.0
"""Time between two load reports of a replica to all proxies. A proxy counts its own requests at once."""
IMPORT_PATH = "motet.deploy.ray.app:application"
SERVE_SETTINGS = frozenset({"port", "app_name", "ray_address"})
"""Settings that a Serve config has elsewhere, or that are given at deployment. The host is in `args`, for replicas."""


def deployment_options(settings: Settings) -> Mapping[str, Options]:
    """Returns the options of each deployment, by its name."""
    ray, cell = settings.ray, settings.cell
    options = {
        DIRECTORY: _deployment(DIRECTORY) | {"num_replicas": 1, "health_check_period_s": MIN_HEALTH_CHECK_S},
        DECODE: _worker(settings, DECODE, role=worker_role(settings), max_replicas=max(1, cell.decode)),
    }
    if cell.prefill:
        options[PREFILL] = _worker(settings, PREFILL, role=Role.PREFILL, max_replicas=cell.prefill)
    if ray.ingress is Ingress.GATEWAY:
        resources = _resources(settings, GATEWAY)
        options[GATEWAY] = _deployment(GATEWAY, settings) | {
            "num_replicas": ray.gateways,
            "ray_actor_options": {"num_cpus": 0} | resources,
            # An update starts the new replicas first only if they need no resources, for which it could wait forever.
            "max_surge_percent": 0 if resources else 100,
            "health_check_period_s": HEALTH_CHECK_S,
        }
    return options


def max_replicas_of(options: Options) -> int:
    """Returns the maximum number of replicas of a deployment."""
    scaling: Options | None = options.get("autoscaling_config")
    return int(options.get("num_replicas", 1) if scaling is None else scaling["max_replicas"])


def _deployment(name: str, settings: Settings | None = None) -> Options:
    """Returns the options that all deployments have. `settings`: None if no answers or engines have to end first."""
    shutdown_s = 1.0 if settings is None else settings.server().drain_timeout_s + SHUTDOWN_MARGIN_S
    return {
        "name": name,
        "max_ongoing_requests": MANY_REQUESTS,
        "ray_actor_options": {"num_cpus": 0},
        "graceful_shutdown_timeout_s": shutdown_s,
        "graceful_shutdown_wait_loop_s": SHUTDOWN_POLL_S,
    }


def _worker(settings: Settings, name: str, *, role: Role, max_replicas: int) -> Options:
    ray = settings.ray
    actor: Options = {"num_cpus": ray.cpus_per_worker, "num_gpus": ray.gpus_per_worker}
    period_s = min(MAX_HEALTH_CHECK_S, max(MIN_HEALTH_CHECK_S, max_replicas / MAX_HEALTH_CHECKS_PER_S))
    autoscaled = _autoscaled(settings, name, max_replicas=max_replicas)
    return {
        **_deployment(name, settings),
        **(autoscaled if ray.autoscale else {"num_replicas": max_replicas}),
        "ray_actor_options": actor | _resources(settings, name),
        "health_check_period_s": HEALTH_CHECK_S if serves_clients(settings, role) else period_s,
    }


def _autoscaled(settings: Settings, name: str, *, max_replicas: int) -> Options:
    ray = settings.ray
    min_replicas, figure, per_replica = {
        PREFILL: (ray.min_prefill, PROMPTS, ray.prompts_per_prefill),
        DECODE: (ray.min_decode, CHOICES, ray.choices_per_decode),
    }[name]
    return {
        "autoscaling_config": {
            "min_replicas": min_replicas,
            "max_replicas": max_replicas,
            "policy": {
                "policy_function": f"{ReplicasByLoad.__module__}.{ReplicasByLoad.__name__}",
                "policy_kwargs": {"figure": figure, "per_replica": per_replica},
            },
            "metrics_interval_s": LOAD_PERIOD_S,
            "look_back_period_s": LOAD_WINDOW_S,
            "upscale_delay_s": ray.scale_up_delay_s,
            "downscale_delay_s": ray.scale_down_delay_s,
            "downscale_to_zero_delay_s": ray.scale_down_delay_s * LAST_REPLICA_DELAY,
        }
    }


def _resources(settings: Settings, name: str) -> Options:
    resources = resources_by_role(settings.ray.resources_of).get(name)
    return {"resources": resources} if resources else {}


def request_router_options(settings: Settings, environ: Mapping[str, str]) -> Options:
    """Returns the options for routing requests to the replicas of the decode deployment."""
    if settings.ray.ingress is not Ingress.DIRECT:
        return {}
    if environ.get(HAPROXY) == "1":
        logger.warning(
            "%s is set: HAProxy sends each request to the replica with the fewest connections. Sessions and the number "
            "of choices have no effect; --ingress gateway considers both, and cached prefixes",
            HAPROXY,
        )
        return {}
    return {
        "request_router_config": {
            "request_router_class": REQUEST_ROUTER,
            "request_router_kwargs": {
                "session_ttl_s": settings.routing.session_expiry_s,
                "session_headers": list(settings.server().session_headers),
            },
            "request_routing_stats_period_s": ROUTING_STATS_PERIOD_S,
        }
    }


def check_trainers(settings: Settings) -> None:
    """Raises ConfigError if `--rl` is set and a trainer's request would reach only one of several servers."""
    ray = settings.ray
    if settings.server().rl and (ray.ingress is not Ingress.GATEWAY or ray.gateways > 1):
        raise ConfigError(
            "--rl needs --ingress gateway and --gateways 1: Serve sends a trainer's request to one replica, and only a "
            "gateway passes new weights on to all workers"
        )


def serve_config(settings: Settings) -> str:
    """Returns the application as YAML without keys, for `serve deploy` and the `serveConfigV2` of a `RayService`."""
    server, ray = settings.server(), settings.ray
    chosen = settings.chosen()
    secret = {name for name in chosen if SETTINGS[name].secret}
    args = {name: value for name, value in chosen.items() if name not in SERVE_SETTINGS | secret}
    secrets = ", ".join(name for name in chosen if name in secret)
    lines = [
        "# For `serve deploy`. This file has no keys: set them in the environment of the nodes (MOTET_CLUSTER_KEY,",
        f"# MOTET_API_KEYS, ...){f'; left out: {secrets}' if secrets else ''}.",
        "proxy_location: EveryNode",
        "http_options:",
        f"  host: {_json(server.host)}",
        f"  port: {server.port}",
        f"  keep_alive_timeout_s: {server.keep_alive_s}",
        "applications:",
        f"  - name: {_json(ray.app_name)}",
        '    route_prefix: "/"',
        f"    import_path: {IMPORT_PATH}",
        f"    args:{'' if args else ' {}'}",
        *(f"      {name}: {_json(value)}" for name, value in args.items()),
    ]
    return "\n".join(lines) + "\n"


def check_arguments(names: Iterable[str]) -> None:
    """Raises ConfigError unless all names are settings of `motet ray`, since users edit config files."""
    known = {name: name for name in names_of(ServerCommand.RAY)}
    for name in names:
        known_setting(name, shown=f"args: {name}", known=known)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
