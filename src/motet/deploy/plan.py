"""What a server is made of, before anything is started: its records, and the engine processes that follow from them."""

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from motet.config import CellConfig, EngineConfig, KVEventsConfig, RoutingConfig, ServerConfig
from motet.text.formats import ParserNames
from motet.types import Role

SIDE_CHANNEL_PORTS = {Role.PREFILL: 20000, Role.DECODE: 22000, Role.BOTH: 0}
"""Of servers with a role, so that others know where to ask; 0 where nobody asks."""
CLUSTER_KEY_BYTES = 16


@dataclass(frozen=True)
class ServerPlan:
    """All that makes up one server."""

    engine: EngineConfig
    """Of every engine, but for what `engine_configs` gives each of its own."""
    server: ServerConfig
    tokenizer_path: Path
    chat_template: str | None
    """Jinja text in place of the model's own."""
    cell: CellConfig = field(default=CellConfig())
    routing: RoutingConfig = field(default=RoutingConfig())
    kv_events: KVEventsConfig = field(default=KVEventsConfig())
    parsers: ParserNames = field(default=ParserNames())
    """How answers are read."""
    death_linger_s: float = 2.0
    """A server without an engine answers 503 for so long, for health checks to see and clients to read their error."""

    @property
    def role(self) -> Role:
        """Of the server as its clients see it."""
        return Role.BOTH if self.cell.prefill + self.cell.decode else self.engine.role


def cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def engine_configs(plan: ServerPlan, *, cores: int) -> dict[str, EngineConfig]:
    """By worker id, one for each process to be started.

    The engines of a cell share the cores evenly, listen on free ports, and have a cluster key that nobody else has:
    two cells on one machine cannot meet.
    """
    engine, cell = plan.engine, plan.cell
    if cell.prefill + cell.decode == 0:
        port = engine.side_channel_port
        name = "engine" if engine.role is Role.BOTH else engine.role.value
        alone = replace(engine, side_channel_port=SIDE_CHANNEL_PORTS[engine.role] if port is None else port)
        return {f"{name}-0": alone}
    shared = replace(
        engine,
        num_threads=engine.num_threads or max(1, cores // (cell.prefill + cell.decode)),
        side_channel_port=0,
        cluster_key=engine.cluster_key or secrets.token_hex(CLUSTER_KEY_BYTES),
    )
    # Without prefill engines there is nobody to fetch KV from: those that decode do it all.
    decode = Role.DECODE if cell.prefill else Role.BOTH
    named = ((Role.PREFILL, Role.PREFILL, cell.prefill), (Role.DECODE, decode, cell.decode))
    return {f"{name}-{i}": replace(shared, role=role) for name, role, number in named for i in range(number)}
