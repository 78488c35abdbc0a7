"""What a rule about settings is."""

from collections.abc import Callable
from dataclasses import dataclass

from motet.config import (
    CellConfig,
    EngineConfig,
    GatewayConfig,
    KVEventsConfig,
    ModelConfig,
    RayConfig,
    RoutingConfig,
    ServerConfig,
)
from motet.settings.record import Settings


@dataclass(frozen=True)
class Proposal:
    """The records as they would be, for rules to look at."""

    model: ModelConfig
    engine: EngineConfig
    cell: CellConfig
    routing: RoutingConfig
    kv_events: KVEventsConfig
    gateway: GatewayConfig
    ray: RayConfig
    server: ServerConfig


@dataclass(frozen=True)
class Rule:
    names: tuple[str, ...]
    """The settings it is about, the one to blame first."""
    says: str
    holds: Callable[[Proposal], bool]

    def of(self, settings: Settings) -> bool:
        """Whether it is about settings of this command."""
        return settings.rows.keys() >= set(self.names)
