"""What a setting is: its name, its type and default (a field of a config record), its flag; and one resolved value."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec.structs import FieldInfo

from motet.config import (
    ENVIRONMENT_PREFIX,
    CellConfig,
    EngineConfig,
    GatewayConfig,
    KVEventsConfig,
    ModelConfig,
    RayConfig,
    RoutingConfig,
    ServerConfig,
)

Config = TypeVar("Config", bound=msgspec.Struct)

DEFAULT: Final = "default"

DECIDED_LATER: Final[Mapping[type[msgspec.Struct], frozenset[str]]] = {
    ModelConfig: frozenset(),
    EngineConfig: frozenset({"model_path", "model_name", "tokenizer_path"}),
    CellConfig: frozenset({"prefill_may_come"}),
    RoutingConfig: frozenset(),
    KVEventsConfig: frozenset(),
    GatewayConfig: frozenset(),
    RayConfig: frozenset(),
    ServerConfig: frozenset({"served_model_name"}),
}
"""Fields that are no settings: they follow from the model that was found, or from what a server is part of."""

FLAGS: Final[Mapping[str, str]] = {
    "model": "MODEL",
    "prefix_cache": "--no-prefix-cache",
    "api_keys": "--api-key",
    "cors_origins": "--cors-origin",
    "num_threads": "--threads",
    "drain_timeout_s": "--drain-timeout",
    "prefill_urls": "--prefill-url",
    "prefill_timeout_s": "--prefill-timeout",
    "pull_timeout_s": "--pull-timeout",
    "lease_s": "--lease",
    "session_expiry_s": "--session-expiry",
    "migration_wait_s": "--migration-wait",
    "queue_timeout_s": "--queue-timeout",
    "heartbeat_timeout_s": "--heartbeat-timeout",
    "step_timeout_s": "--step-timeout",
    "workers": "--worker",
    "worker_timeout_s": "--worker-timeout",
    "start_timeout_s": "--start-timeout",
    "leader_timeout_s": "--leader-timeout",
    "upstream_timeout_s": "--upstream-timeout",
    "scale_up_delay_s": "--scale-up-delay",
    "scale_down_delay_s": "--scale-down-delay",
}
"""Flags that are not their setting's name with dashes."""

SECRETS: Final = frozenset({"api_keys", "admin_key", "prefill_api_key", "cluster_key", "worker_api_key", "key_of"})


OF_A_MACHINE: Final = frozenset({"side_channel_host"})
"""What a machine's environment says is for that machine alone."""


def setting_fields() -> dict[str, FieldInfo]:
    """Every setting by name, in the order in which it is declared."""
    return {field.name: field for config in DECIDED_LATER for field in _settings_in(config)}


def _settings_in(config: type[msgspec.Struct]) -> list[FieldInfo]:
    return [field for field in msgspec.structs.fields(config) if field.name not in DECIDED_LATER[config]]


def _names(*configs: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(field.name for config in configs for field in _settings_in(config))


SERVE: Final = _names(ModelConfig, EngineConfig, CellConfig, RoutingConfig, KVEventsConfig, ServerConfig)
"""The settings of `motet serve`."""
GATEWAY: Final = (
    *("served_model_name", "tokenizer", "chat_template", "tool_parser", "reasoning_parser"),
    *_names(GatewayConfig),
    *("bypass_tokens", "prefill_timeout_s"),
    *(name for name in _names(RoutingConfig) if name != "engine_restarts"),
    *_names(ServerConfig),
)
"""The settings of `motet gateway`, which has no engine of its own."""
RAY: Final = (
    *_names(ModelConfig),
    *(name for name in _names(EngineConfig) if name not in ("role", "side_channel_port")),
    *("prefill", "decode", "bypass_tokens", "prefill_timeout_s"),
    *_names(RoutingConfig),
    *("worker_timeout_s", "start_timeout_s"),
    *_names(RayConfig),
    *_names(ServerConfig),
)
"""The settings of `motet ray`, whose replicas find each other, and their ports, by themselves."""


def flag_of(name: str) -> str:
    return FLAGS.get(name) or "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Setting:
    """One value and who said so."""

    name: str
    value: object
    source: str
    """`default`, the file's name, the variable or the flag."""

    @property
    def is_default(self) -> bool:
        return self.source.startswith(DEFAULT)

    @property
    def is_of_this_machine(self) -> bool:
        return self.name in OF_A_MACHINE and self.source.startswith(ENVIRONMENT_PREFIX)

    @property
    def shown(self) -> str:
        """The value for people; secrets are counted, not shown."""
        match self.value:
            case None | ():
                return "-"
            case str() if self.name in SECRETS:
                return "given" if self.value else "-"
            case bool():
                return "yes" if self.value else "no"
            case tuple() if self.name in SECRETS:
                return f"{len(self.value)} given"
            case tuple():
                return ", ".join(map(str, self.value))
            case _:
                return str(self.value)


@dataclass(frozen=True)
class Settings:
    """The settings of one command by name, resolved; those of other commands have their defaults."""

    rows: Mapping[str, Setting]

    @property
    def model(self) -> ModelConfig:
        return self._fill(ModelConfig, {})

    def engine(self, *, model_path: Path, model_name: str) -> EngineConfig:
        return self._fill(EngineConfig, {"model_path": str(model_path), "model_name": model_name})

    @property
    def cell(self) -> CellConfig:
        return self._fill(CellConfig, {})

    @property
    def routing(self) -> RoutingConfig:
        return self._fill(RoutingConfig, {})

    @property
    def kv_events(self) -> KVEventsConfig:
        return self._fill(KVEventsConfig, {})

    @property
    def gateway(self) -> GatewayConfig:
        return self._fill(GatewayConfig, {})

    @property
    def ray(self) -> RayConfig:
        return self._fill(RayConfig, {})

    def server(self, *, served_model_name: str) -> ServerConfig:
        return self._fill(ServerConfig, {"served_model_name": served_model_name})

    def chosen(self) -> dict[str, object]:
        """The values that are not defaults, as JSON has them: what makes the same settings again elsewhere. What holds
        for this machine alone is left out; another one has its own."""
        chosen = [row for row in self.rows.values() if not (row.is_default or row.is_of_this_machine)]
        return {row.name: msgspec.to_builtins(row.value) for row in chosen}

    def _fill(self, config: type[Config], decided: dict[str, str]) -> Config:
        wanted = {field.name for field in _settings_in(config)} & self.rows.keys()
        return msgspec.convert(decided | {name: self.rows[name].value for name in wanted}, config)
