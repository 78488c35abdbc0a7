"""What the replicas are, from the settings of the application and the place each runs at.

The model is found, or fetched, on the node of each replica: a folder must be there under the same path.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from motet.config import KVEventsConfig, cache_folder
from motet.deploy.gateway_server import GatewayPlan
from motet.deploy.ray.ports import side_channel_ports
from motet.deploy.ray.worker import WorkerPlan
from motet.deploy.resolved import parser_names, read_template, server_config, server_plan
from motet.deploy.tokenizers import TokenizerRules
from motet.models import resolve_tokenizer
from motet.settings import Settings
from motet.settings.ray_rules import devices_of
from motet.transfer.address import is_loopback
from motet.types import Ingress, Role

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where a replica runs, and which it is."""

    id: str
    """Of this start of it."""
    address: str
    """At which the other nodes reach its node."""
    rank: int
    """Among the replicas of its deployment; given again when one has gone."""


def worker_role(settings: Settings) -> Role:
    """Of the replicas that decode: without any for prefill they do it all."""
    return Role.DECODE if settings.cell.prefill else Role.BOTH


def serves_clients(settings: Settings, role: Role) -> bool:
    """Whether a replica of this role holds the streams of clients."""
    return settings.ray.ingress is Ingress.DIRECT and role is not Role.PREFILL


def worker_plan(settings: Settings, role: Role, place: Place, *, environ: Mapping[str, str]) -> WorkerPlan:
    """Raises StartupError."""
    plan = server_plan(settings, cache=cache_folder(environ), say=logger.info)
    ray = settings.ray
    engine = msgspec.structs.replace(
        plan.engine,
        role=role,
        num_threads=plan.engine.num_threads or math.ceil(ray.cpus_per_worker),
        side_channel_host=_side_channel_host(settings, place),
    )
    keys = plan.server.api_keys if serves_clients(settings, role) else (engine_key(settings),)
    server = msgspec.structs.replace(plan.server, host=place.address, port=0, api_keys=tuple(filter(None, keys)))
    may_come = serves_clients(settings, role) and bool(plan.cell.prefill)
    cell = msgspec.structs.replace(plan.cell, prefill=0, decode=0, prefill_may_come=may_come)
    # Whoever reaches their port reads the tokens of prompts: there is none where nobody follows them.
    followed = engine.prefix_cache and (not serves_clients(settings, role) or ray.prefix_router)
    return WorkerPlan(
        place.id,
        replace(
            plan,
            engine=engine,
            server=server,
            cell=cell,
            kv_events=KVEventsConfig(kv_events_port=0 if followed else None, kv_events_host=place.address),
        ),
        side_channel_ports(role, place.rank, ray, devices=devices_of(ray)),
    )


def engine_key(settings: Settings) -> str:
    """What replicas want of each other, over HTTP and the side channel."""
    return str(settings.rows["cluster_key"].value)


def gateway_plan(settings: Settings, place: Place, *, environ: Mapping[str, str]) -> GatewayPlan:
    """Raises StartupError."""
    cache = cache_folder(environ)
    model, gateway = settings.model, settings.gateway
    server = server_config(settings)
    # For those who count or ask this very replica; clients come through Serve, which listens where the settings say.
    host = server.host if is_loopback(server.host) else place.address
    folder = None if model.tokenizer is None else resolve_tokenizer(model.tokenizer, cache=cache, say=logger.info)
    return GatewayPlan(
        msgspec.structs.replace(gateway, worker_api_key=engine_key(settings) or None),
        msgspec.structs.replace(server, host=host, port=0),
        tokenizers=TokenizerRules(
            {}, others=folder, chat_template=read_template(model.chat_template), parsers=parser_names(settings)
        ),
        routing=settings.routing,
        cell=msgspec.structs.replace(settings.cell, prefill_may_come=bool(settings.cell.prefill)),
        introduces=False,
    )


def _side_channel_host(settings: Settings, place: Place) -> str:
    """The node's address, unless somebody says otherwise."""
    row = settings.rows["side_channel_host"]
    return place.address if row.is_default else str(row.value)
