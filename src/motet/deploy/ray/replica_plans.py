"""The plans of replicas, from the settings of the application and the place of each replica.

Each replica finds or downloads the model on its own node: a folder must have the same path on every node."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from motet.deploy.ray.worker import WorkerPlan, side_channel_ports
from motet.deploy.server_plan import GatewayPlan, gateway_plan, server_config, server_plan
from motet.models.progress import Lines
from motet.sampling_defaults import DefaultRules
from motet.session_ids import headers_on_ray
from motet.settings.ray_config import Ingress
from motet.settings.record import Settings
from motet.settings.server_config import KVEventsConfig, cache_folder
from motet.system.machine import cores
from motet.transfer.ticket import is_loopback
from motet.types import Role

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplicaPlace:
    """The identity and the place of a replica."""

    id: str
    """Identifier of this start of the replica."""
    address: str
    """Address at which other nodes reach the replica's node."""
    rank: int
    """Number of the replica in its deployment; the numbers of ended replicas are used again."""


def worker_role(settings: Settings) -> Role:
    """Returns the role of decode replicas: BOTH if there are no prefill replicas."""
    return Role.DECODE if settings.cell.prefill else Role.BOTH


def serves_clients(settings: Settings, role: Role) -> bool:
    """Returns True if a replica of this role holds the streams of clients."""
    return settings.ray.ingress is Ingress.DIRECT and role is not Role.PREFILL


def engine_key(settings: Settings) -> str:
    """Returns the worker key that replicas require of each other: the cluster key, unless another is set."""
    return settings.server().worker_key or str(settings.rows["cluster_key"].value)


def worker_plan(settings: Settings, role: Role, *, place: ReplicaPlace, environ: Mapping[str, str]) -> WorkerPlan:
    """Returns the plan of a prefill or decode replica. Raises StartupError."""
    plan = server_plan(settings, cache=cache_folder(environ), progress=Lines(logger.info))
    direct = serves_clients(settings, role)
    side_channel = settings.rows["side_channel_host"]
    threads = math.ceil(settings.ray.cpus_per_worker)
    replicas = settings.cell.prefill + max(1, settings.cell.decode)
    engine = replace(
        plan.engine,
        role=role,
        num_threads=plan.engine.num_threads or threads,
        num_engines=max(1, min(replicas, cores() // max(1, threads))),  # replicas that fit on the node
        side_channel_host=place.address if side_channel.is_default else str(side_channel.value),
    )
    worker_key = engine_key(settings)
    keys = plan.server.api_keys if direct else (worker_key,)  # only gateways send requests to the other replicas
    # A program that reaches the port of block events can read the tokens of prompts. Only gateways follow these events,
    # so replicas that serve clients directly publish none.
    publishes = engine.prefix_cache and not direct
    plan = replace(
        plan,
        engine=engine,
        server=replace(
            plan.server,
            host=place.address,
            port=0,
            api_keys=tuple(filter(None, keys)),
            worker_key=worker_key,
            session_headers=headers_on_ray(plan.server.session_headers, environ),
        ),
        cell=replace(plan.cell, prefill=0, decode=0, prefill_may_come=direct and bool(plan.cell.prefill)),
        kv_events=KVEventsConfig(kv_events_port=0 if publishes else None, kv_events_host=place.address),
        worker_id=place.id,
    )
    prefill = settings.gateway if direct and role is Role.DECODE else None
    return WorkerPlan(plan, side_channel_ports(role, place.rank, ray=settings.ray), prefill)


def gateway_replica_plan(settings: Settings, place: ReplicaPlace, *, environ: Mapping[str, str]) -> GatewayPlan:
    """Returns the plan of a gateway replica. Raises StartupError."""
    plan = gateway_plan(settings, cache=cache_folder(environ), progress=Lines(logger.info))
    server = server_config(settings)
    # Host and port for requests to this replica only. Clients use Serve's, which are in the settings.
    host = server.host if is_loopback(server.host) else place.address
    return replace(
        plan,
        server=replace(
            server,
            host=host,
            port=0,
            worker_key=engine_key(settings),
            session_headers=headers_on_ray(server.session_headers, environ),
        ),
        defaults=DefaultRules(),  # replicas with engines report their defaults
        find_tokenizer=None,  # replicas are Motet's own servers, which send their tokenizer
        cell=replace(plan.cell, prefill_may_come=bool(plan.cell.prefill)),
        connects_workers=False,
    )
