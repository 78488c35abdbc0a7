"""The options of the application for Serve: the number of replicas of each deployment, their arguments, their time to
end, the routing of requests, and all of it as a config file.

The way of requests to a decode replica that serves clients itself depends on Serve's proxy:

    Serve's own proxy    a `ChoicesRouter` in it
    HAProxy              the replica with the fewest connections: HAProxy does not use Serve's routers
    HAProxy and hook     the replica that our own router names (`--prefix-router`)

Nothing here needs Ray, so the command line prints the config without loading it.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from motet.deploy.ray.clients import ASK_S
from motet.deploy.ray.replica_plans import serves_clients, worker_role
from motet.deploy.ray.scaling import CHOICES, PROMPTS, ReplicasByLoad
from motet.errors import ConfigError
from motet.settings.declaration import ServerCommand
from motet.settings.named_worker import resources_by_role
from motet.settings.record import Settings
from motet.settings.resolve import known_setting, names_of
from motet.settings.server_config import SETTINGS
from motet.types import Ingress, Role

logger = logging.getLogger(__name__)

DIRECTORY, PREFILL, DECODE, GATEWAY, ROUTER = "directory", "prefill", "decode", "gateway", "router"

Options = dict[str, Any]
"""Options of one deployment, as `serve.deployment` takes them."""

MANY_REQUESTS = 100_000
"""No limit in Serve: the server in the replica has limits, and refuses requests with a reason."""
END_MARGIN_S = 15.0
"""Seconds for engines to end, after the time for answers."""
LOOK_S = 0.2
"""Seconds between two checks of Serve if an ending replica still has requests."""
LEAST_ASK_S, MOST_ASK_S = ASK_S, 10.0
"""Least and most seconds between two health checks of a replica by Serve, which notice that one is dead."""
ASKS_A_SECOND = 100.0
"""Most health checks of a deployment in a second: the controller is one process."""
TELL_S = 2.0
"""Seconds between two reports of load."""
MEAN_S = 5.0
"""Seconds over which the load is averaged: a single look may find a replica between two groups."""
LAST_STAYS = 5
"""The last replica stays this many times as long as others, since the next prompt must wait for a new engine."""

HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
FORWARD_BODY = "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY"
REQUEST_ROUTER = "motet.deploy.ray.request_router.ChoicesRouter"
STATS_PERIOD_S = 2.0
"""Seconds between two records of a replica, which go to every proxy. A proxy's own requests count at once."""
HOOK_RAY = "2.60."
"""Version of Ray with the known hook."""
IMPORT_PATH = "motet.deploy.ray.app:application"
SERVE_SETTINGS = frozenset({"port", "app_name", "ray_address"})
"""Settings that the config has elsewhere, or that are given at deployment. Replicas need the host too."""


def deployment_options(settings: Settings) -> Mapping[str, Options]:
    """Returns the options of each deployment by its name."""
    ray, cell = settings.ray, settings.cell
    options = {
        DIRECTORY: _deployment(DIRECTORY) | {"num_replicas": 1, "health_check_period_s": LEAST_ASK_S},
        DECODE: _worker(settings, DECODE, role=worker_role(settings), most=max(1, cell.decode)),
    }
    if cell.prefill:
        options[PREFILL] = _worker(settings, PREFILL, role=Role.PREFILL, most=cell.prefill)
    if ray.ingress is Ingress.GATEWAY:
        resources = _resources(settings, GATEWAY)
        options[GATEWAY] = _deployment(GATEWAY, settings) | {
            "num_replicas": ray.gateways,
            "ray_actor_options": {"num_cpus": 0} | resources,
            # An update starts new replicas first if there is room for certain; else it could wait for room for ever.
            "max_surge_percent": 0 if resources else 100,
            "health_check_period_s": ASK_S,
        }
    if ray.prefix_router:
        options[ROUTER] = _deployment(ROUTER)
    return options


def most_replicas(options: Options) -> int:
    """Returns the largest number of replicas that a deployment may have."""
    scaling: Options | None = options.get("autoscaling_config")
    return int(options.get("num_replicas", 1) if scaling is None else scaling["max_replicas"])


def _deployment(name: str, settings: Settings | None = None) -> Options:
    """Returns the common options of deployments. `settings`: given if answers and engines need time to end."""
    end_s = 1.0 if settings is None else settings.server().drain_timeout_s + END_MARGIN_S
    return {
        "name": name,
        "max_ongoing_requests": MANY_REQUESTS,
        "ray_actor_options": {"num_cpus": 0},
        "graceful_shutdown_timeout_s": end_s,
        "graceful_shutdown_wait_loop_s": LOOK_S,
    }


def _worker(settings: Settings, name: str, *, role: Role, most: int) -> Options:
    ray = settings.ray
    actor: Options = {"num_cpus": ray.cpus_per_worker, "num_gpus": ray.gpus_per_worker}
    ask_s = min(MOST_ASK_S, max(LEAST_ASK_S, most / ASKS_A_SECOND))
    return {
        **_deployment(name, settings),
        **(_autoscaled(settings, name, most=most) if ray.autoscale else {"num_replicas": most}),
        "ray_actor_options": actor | _resources(settings, name),
        "health_check_period_s": ASK_S if serves_clients(settings, role) else ask_s,
    }


def _autoscaled(settings: Settings, name: str, *, most: int) -> Options:
    ray = settings.ray
    least, counted, per_replica = {
        PREFILL: (ray.min_prefill, PROMPTS, ray.prompts_per_prefill),
        DECODE: (ray.min_decode, CHOICES, ray.choices_per_decode),
    }[name]
    return {
        "autoscaling_config": {
            "min_replicas": least,
            "max_replicas": most,
            "policy": {
                "policy_function": f"{ReplicasByLoad.__module__}.{ReplicasByLoad.__name__}",
                "policy_kwargs": {"counted": counted, "per_replica": per_replica},
            },
            "metrics_interval_s": TELL_S,
            "look_back_period_s": MEAN_S,
            "upscale_delay_s": ray.scale_up_delay_s,
            "downscale_delay_s": ray.scale_down_delay_s,
            "downscale_to_zero_delay_s": ray.scale_down_delay_s * LAST_STAYS,
        }
    }


def _resources(settings: Settings, name: str) -> Options:
    resources = resources_by_role(settings.ray.resources_of).get(name)
    return {"resources": resources} if resources else {}


def request_router_options(settings: Settings, environ: Mapping[str, str]) -> Options:
    """Returns the options for routing requests to the replicas of the decode deployment."""
    if settings.ray.ingress is not Ingress.DIRECT:
        return {}
    if _is_on(environ, HAPROXY) and not settings.ray.prefix_router:
        logger.warning(
            "%s is set: HAProxy gives each request to the replica with the fewest connections, whatever its session, "
            "its choices and its prompt; with --prefix-router these count",
            HAPROXY,
        )
        return {}
    return {
        "request_router_config": {
            "request_router_class": REQUEST_ROUTER,
            "request_router_kwargs": {"session_ttl_s": settings.routing.session_expiry_s},
            "request_routing_stats_period_s": STATS_PERIOD_S,
        }
    }


def check_hook(settings: Settings, environ: Mapping[str, str], *, ray_version: str) -> None:
    """Raises ConfigError if `--prefix-router` is set and cannot work."""
    if not settings.ray.prefix_router:
        return
    if not ray_version.startswith(HOOK_RAY):
        raise ConfigError(
            f"--prefix-router uses an internal hook of Ray {HOOK_RAY}x, and this is Ray {ray_version}. Install "
            "that version, or leave the flag out"
        )
    if missing := [name for name in (HAPROXY, FORWARD_BODY) if not _is_on(environ, name)]:
        raise ConfigError(
            f"--prefix-router needs HAProxy, which sends it the bodies of requests: set "
            f"{' and '.join(f'{name}=1' for name in missing)} here and on all nodes of the cluster before Ray starts"
        )


def check_trainers(settings: Settings) -> None:
    """Raises ConfigError if `--rl` is set where a request of a trainer would reach one of several servers."""
    ray = settings.ray
    if settings.server().rl and (ray.ingress is not Ingress.GATEWAY or ray.gateways > 1):
        raise ConfigError(
            "--rl needs --ingress gateway and --gateways 1: Serve gives a trainer's request to one replica, and only a "
            "gateway passes new weights on to all"
        )


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name) == "1"


def serve_config(settings: Settings) -> str:
    """Returns the application as YAML without keys, for `serve deploy` and the `serveConfigV2` of a `RayService`."""
    server, ray = settings.server(), settings.ray
    chosen = settings.chosen()
    secret = {name for name in chosen if SETTINGS[name].secret}
    args = {name: value for name, value in chosen.items() if name not in SERVE_SETTINGS | secret}
    secrets = ", ".join(name for name in chosen if name in secret)
    lines = [
        "# For `serve deploy`. Keys are not written here: set them in the environment of the nodes (MOTET_CLUSTER_KEY,",
        f"# MOTET_API_KEYS, ...){f'; left out: {secrets}' if secrets else ''}.",
        "proxy_location: EveryNode",
        "http_options:",
        f"  host: {_json(server.host)}",
        f"  port: {server.port}",
        "applications:",
        f"  - name: {_json(ray.app_name)}",
        '    route_prefix: "/"',
        f"    import_path: {IMPORT_PATH}",
        f"    args:{'' if args else ' {}'}",
        *(f"      {name}: {_json(value)}" for name, value in args.items()),
    ]
    return "\n".join(lines) + "\n"


def check_arguments(names: Iterable[str]) -> None:
    """Raises ConfigError unless all are settings of `motet ray`: a config may be written by hand."""
    known = {name: name for name in names_of(ServerCommand.RAY)}
    for name in names:
        known_setting(name, shown=f"args: {name}", known=known)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
