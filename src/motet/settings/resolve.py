"""Reads the sources of settings, lays them over each other, and refuses what cannot be."""

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import get_origin

import msgspec

from motet.config import ENVIRONMENT_PREFIX
from motet.errors import ConfigError
from motet.settings.record import DEFAULT, SERVE, Setting, Settings, flag_of, setting_fields
from motet.settings.rules import check_rules, fit_defaults

CONFIG_VARIABLE = "MOTET_CONFIG"
NOT_SETTINGS = frozenset({CONFIG_VARIABLE, "MOTET_CACHE_DIR", "MOTET_VLLM_VENV"})
"""Variables with our prefix that are no settings: the file to read, where models are kept, where tests find vLLM."""
COMMAS_IN_FLAGS = frozenset({"prefill_urls", "workers"})
"""Lists whose flag may name several at once, as their variable does."""


def resolve_settings(
    flags: Mapping[str, object],
    *,
    environ: Mapping[str, str],
    file: Path | None = None,
    names: Iterable[str] = SERVE,
) -> Settings:
    """Lays the sources over each other; a flag that is None was not given. `names`: the settings of the command; those
    that file and environment have for other commands are passed over. Raises `ConfigError`."""
    fields = setting_fields()
    rows = {name: Setting(name, fields[name].default, DEFAULT) for name in names}
    if file is None and (named := environ.get(CONFIG_VARIABLE)):
        file = Path(named).expanduser()
    sources = [from_environment(environ), from_flags(flags)]
    if file is not None:
        sources.insert(0, from_file(file))
    for source in sources:
        rows |= {setting.name: setting for setting in source if setting.name in rows}
    settings = Settings(fit_defaults(rows))
    check_rules(settings)
    return settings


def from_file(file: Path) -> Iterator[Setting]:
    try:
        content = tomllib.loads(file.read_text())
    except FileNotFoundError as exc:
        raise ConfigError(f"--config {file}: there is no such file") from exc
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"--config {file}: cannot be read as TOML: {exc}") from exc
    for name, value in content.items():
        known_setting(name, shown=f"{file}: {name}", known={known: known for known in setting_fields()})
        yield Setting(name, converted(name, value, shown=f"{file}: {name}"), str(file))


def from_environment(environ: Mapping[str, str]) -> Iterator[Setting]:
    variables = {ENVIRONMENT_PREFIX + name.upper(): name for name in setting_fields()}
    for variable in sorted(environ):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in NOT_SETTINGS:
            continue
        text = environ[variable]
        if text.startswith("tcp://") or variable.startswith("MOTET_SERVICE_"):
            raise ConfigError(
                f"{variable}={text} is set by Kubernetes for a service called motet and would be read as a setting: "
                "rename the service or set enableServiceLinks: false"
            )
        name = known_setting(variable, shown=variable, known=variables)
        yield Setting(name, converted(name, text, shown=f"{variable}={text}"), variable)


def from_flags(flags: Mapping[str, object]) -> Iterator[Setting]:
    for name, value in flags.items():
        if value is not None:
            if name in COMMAS_IN_FLAGS and isinstance(value, list):
                value = ",".join(map(str, value))
            yield Setting(name, converted(name, value, shown=f"{flag_of(name)} {value}"), flag_of(name))


def known_setting(written: str, *, shown: str, known: Mapping[str, str]) -> str:
    """The setting that `written` names, of `known` (as written: setting)."""
    if written in known:
        return known[written]
    near = difflib.get_close_matches(written, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    raise ConfigError(f"{shown}: there is no such setting; {hint}")


def converted(name: str, value: object, *, shown: str) -> object:
    """The value in the setting's own type. Text (from the environment) may stand for a number, a bool or a list."""
    wanted = setting_fields()[name].type
    if isinstance(value, str) and get_origin(wanted) is tuple:
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(wanted, type) and issubclass(wanted, StrEnum) and value not in tuple(wanted):
        raise ConfigError(f"{shown}: must be one of {', '.join(wanted)}")
    try:
        return msgspec.convert(value, wanted, strict=not isinstance(value, str))
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{shown}: {str(exc)[0].lower()}{str(exc)[1:]}") from exc
