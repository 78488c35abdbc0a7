"""How many replicas there are of each deployment, what they are given, and how long they have to end."""

from collections.abc import Mapping
from typing import Any

from motet.deploy.ray.interest import ASK_S
from motet.deploy.ray.replica_plans import serves_clients, worker_role
from motet.deploy.ray.scaling import CHOICES, PROMPTS, ReplicasByLoad
from motet.settings import Settings
from motet.settings.ray_rules import resources_by_role
from motet.types import Ingress, Role

DIRECTORY, PREFILL, DECODE, GATEWAY = "directory", "prefill", "decode", "gateway"

Options = dict[str, Any]
"""Of one deployment, as `serve.deployment` takes them."""

MANY_REQUESTS = 100_000
"""How many there may be is said by the server in the replica, before the first byte and with a reason."""
END_MARGIN_S = 15.0
"""Beyond the time that answers have: for engines to end."""
LOOK_S = 0.2
"""Between two looks of Serve whether a replica that is to end has requests."""
LEAST_ASK_S, MOST_ASK_S = ASK_S, 10.0
"""Between two questions of Serve for the health of a replica: by them it learns that one is dead."""
ASKS_A_SECOND = 100.0
"""Of all replicas of a deployment: the controller is one process."""

TELL_S = 2.0
"""Between two times that replicas tell their load. Serve says that variables of its environment will take the place of
this option; in this version nothing reads them yet."""
MEAN_S = 5.0
"""The time whose mean load counts: one look alone may find a replica between two groups."""
LAST_STAYS = 5
"""How often the time that others have before they end: when the next prompt comes, its absence costs the start of an
engine."""


def deployment_options(settings: Settings) -> Mapping[str, Options]:
    """By name of the deployment."""
    ray, cell = settings.ray, settings.cell
    decode = _worker(settings, DECODE, worker_role(settings), most=max(1, cell.decode))
    options = {DIRECTORY: _directory(), DECODE: decode}
    if cell.prefill:
        options[PREFILL] = _worker(settings, PREFILL, Role.PREFILL, most=cell.prefill)
    if ray.ingress is Ingress.GATEWAY:
        options[GATEWAY] = _gateway(settings)
    return options


def most_replicas(options: Options) -> int:
    """That a deployment may come to have."""
    scaling: Options | None = options.get("autoscaling_config")
    return int(options["num_replicas"] if scaling is None else scaling["max_replicas"])


def _directory() -> Options:
    return {
        "name": DIRECTORY,
        "num_replicas": 1,
        "max_ongoing_requests": MANY_REQUESTS,
        "ray_actor_options": {"num_cpus": 0},
        "health_check_period_s": LEAST_ASK_S,
        "graceful_shutdown_timeout_s": 1.0,
        "graceful_shutdown_wait_loop_s": LOOK_S,
    }


def _worker(settings: Settings, name: str, role: Role, *, most: int) -> Options:
    ray = settings.ray
    actor: Options = {"num_cpus": ray.cpus_per_worker, "num_gpus": ray.gpus_per_worker}
    return {
        "name": name,
        **_replicas(settings, name, most=most),
        "max_ongoing_requests": MANY_REQUESTS,
        "ray_actor_options": actor | _resources(settings, name),
        "health_check_period_s": ASK_S if serves_clients(settings, role) else _ask_s(most),
        **_ending(settings),
    }


def _ask_s(replicas: int) -> float:
    return min(MOST_ASK_S, max(LEAST_ASK_S, replicas / ASKS_A_SECOND))


def _replicas(settings: Settings, name: str, *, most: int) -> Options:
    ray = settings.ray
    if not ray.autoscale:
        return {"num_replicas": most}
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


def _gateway(settings: Settings) -> Options:
    resources = _resources(settings, GATEWAY)
    return {
        "name": GATEWAY,
        "num_replicas": settings.ray.gateways,
        "max_ongoing_requests": MANY_REQUESTS,
        "ray_actor_options": {"num_cpus": 0} | resources,
        # An update starts new ones first, where there is room for certain: else it would wait for room for ever.
        "max_surge_percent": 0 if resources else 100,
        "health_check_period_s": ASK_S,
        **_ending(settings),
    }


def _ending(settings: Settings) -> Options:
    drain_s = settings.server(served_model_name="").drain_timeout_s
    return {"graceful_shutdown_timeout_s": drain_s + END_MARGIN_S, "graceful_shutdown_wait_loop_s": LOOK_S}


def _resources(settings: Settings, name: str) -> Options:
    resources = resources_by_role(settings.ray.resources_of).get(name)
    return {"resources": resources} if resources else {}
