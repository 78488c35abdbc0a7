"""A resolved value with its source, and the resolved settings of one command, as records for the parts of a server."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from motet.log import cut, escaped
from motet.settings import server_config as config
from motet.settings.batch_config import BatchConfig
from motet.settings.declaration import ENVIRONMENT_PREFIX, Declaration, Mark
from motet.settings.engine_config import EngineConfig, ModelConfig
from motet.settings.gateway_config import GatewayConfig
from motet.settings.ray_config import RayConfig
from motet.settings.tls_config import TlsConfig

Record = TypeVar("Record")

DEFAULT: Final = "default"
UNSET: Final = "-"
MAX_SHOWN_CHARS: Final = 200


def one_line(value: str) -> str:
    """Returns a user's value as it is shown in errors and tables: escaped, and cut off if it is long."""
    return escaped(cut(value, MAX_SHOWN_CHARS))


@dataclass(frozen=True)
class Setting:
    """One value with its source."""

    name: str
    value: object
    source: str
    """Source of the value: `default`, the file's name, the variable or the flag."""

    @property
    def declared(self) -> Declaration:
        return config.SETTINGS[self.name]

    @property
    def is_default(self) -> bool:
        return self.source.startswith(DEFAULT)

    @property
    def is_unset(self) -> bool:
        """True if this is a default without a value, which an error would show as `-`."""
        return self.is_default and self.shown == UNSET

    @property
    def shown(self) -> str:
        """The value as text. Secrets are counted, not shown."""
        match self.value:
            case None | ():
                return UNSET
            case str() if self.declared.secret:
                return "given" if self.value else UNSET
            case bool():
                return "yes" if self.value else "no"
            case tuple() if self.declared.secret:
                return f"{len(self.value)} given"
            case tuple():
                return one_line(", ".join(map(str, self.value)))
            case _:
                return one_line(str(self.value))

    @property
    def as_given(self) -> str:
        """The setting as the user gave it: `--port 99999`, `--no-prefix-cache`, `port 99999 (motet.toml)`."""
        if self.source != self.declared.flag_for(self.value):
            return f"{self.name} {self.shown} ({self.source})"
        return self.source if isinstance(self.value, bool) else f"{self.source} {self.shown}"


@dataclass(frozen=True)
class Settings:
    """The resolved settings of one command by name. Settings of other commands have their defaults."""

    rows: Mapping[str, Setting]

    @property
    def model(self) -> ModelConfig:
        return self._fill(ModelConfig)

    def engine(self, *, model_path: Path = Path(), model_name: str = "", model_root: str = "") -> EngineConfig:
        return self._fill(EngineConfig, model_path=str(model_path), model_name=model_name, model_root=model_root)

    @property
    def cell(self) -> config.CellConfig:
        return self._fill(config.CellConfig)

    @property
    def routing(self) -> config.RoutingConfig:
        return self._fill(config.RoutingConfig)

    @property
    def kv_events(self) -> config.KVEventsConfig:
        return self._fill(config.KVEventsConfig)

    @property
    def gateway(self) -> GatewayConfig:
        return self._fill(GatewayConfig)

    @property
    def tls(self) -> TlsConfig:
        return self._fill(TlsConfig)

    @property
    def ray(self) -> RayConfig:
        return self._fill(RayConfig)

    def server(self, *, served_model_name: str = "") -> config.ServerConfig:
        return self._fill(config.ServerConfig, served_model_name=served_model_name, batches=self._fill(BatchConfig))

    def chosen(self) -> dict[str, object]:
        """Returns the values that are not defaults, as JSON values, except values for this machine only."""
        chosen = {}
        for row in self.rows.values():
            of_this_machine = Mark.THIS_MACHINE in row.declared.marks and row.source.startswith(ENVIRONMENT_PREFIX)
            if not (row.is_default or of_this_machine):
                chosen[row.name] = msgspec.to_builtins(row.value)
        return chosen

    def _fill(self, record: type[Record], **decided: object) -> Record:
        values = {name: self.rows[name].value for name in config.RECORDS[record] if name in self.rows}
        return record(**decided, **values)
