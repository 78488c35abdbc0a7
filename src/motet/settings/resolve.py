"""Resolves settings from their sources in order of precedence, and refuses values that are not allowed."""

import contextlib
import tomllib
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

from motet.errors import ConfigError
from motet.settings.declaration import ENVIRONMENT_PREFIX, Mark, ServerCommand
from motet.settings.record import DEFAULT, Setting, Settings, one_line
from motet.settings.rules import check_rules, fit_defaults
from motet.settings.server_config import SETTINGS
from motet.settings.vllm_flags import VALUES

CONFIG_VARIABLE = "MOTET_CONFIG"
MIN_LIKENESS = 0.75
"""Minimum likeness of a name that an error suggests, from 0 to 1."""
LOGGING = ("log_format", "log_level")
NOT_SETTINGS = frozenset({CONFIG_VARIABLE, "MOTET_CACHE_DIR"})
"""Variables with Motet's prefix that are not settings: the config file, and the folder of models."""


def resolve_settings(
    flags: Mapping[str, object],
    *,
    environ: Mapping[str, str],
    file: Path | None = None,
    command: ServerCommand = ServerCommand.SERVE,
) -> Settings:
    """Returns the settings of a command: default < file < environment < flags. Flags that are None and settings of
    other commands are ignored. Raises ConfigError."""
    rows = {name: Setting(name, SETTINGS[name].default, DEFAULT) for name in names_of(command)}
    sources = [from_environment(environ), from_flags(flags)]
    if file is not None:
        sources.insert(0, from_file(file, named_by="--config "))
    elif named := environ.get(CONFIG_VARIABLE):
        sources.insert(0, from_file(Path(named).expanduser(), named_by=f"{CONFIG_VARIABLE}="))
    for source in sources:
        rows |= {setting.name: setting for setting in source if setting.name in rows}
    settings = Settings(fit_defaults(rows))
    check_rules(settings)
    return settings


def logging_choice(given: Mapping[str, str], *, environ: Mapping[str, str]) -> tuple[str, str]:
    """Returns the format and the level of log lines for the time before the settings are resolved. `given`: texts of
    flags by name. Whatever is wrong is ignored here and refused later."""
    chosen: dict[str, object] = {}
    with contextlib.suppress(OSError, ValueError):
        file = given.get("config") or environ.get(CONFIG_VARIABLE)
        chosen |= tomllib.loads(Path(file).expanduser().read_text()) if file else {}
    for name in LOGGING:
        for value in (environ.get(SETTINGS[name].variable), given.get(name)):
            chosen |= {} if value is None else {name: value}
    allowed = {name: value for name, value in chosen.items() if name in LOGGING and not SETTINGS[name].refusal(value)}
    values = [str(allowed.get(name, SETTINGS[name].default)) for name in LOGGING]
    return values[0], values[1]


def names_of(command: ServerCommand) -> tuple[str, ...]:
    """Returns the names of a command's settings, in the order of their declarations."""
    return tuple(name for name, declared in SETTINGS.items() if command in declared.commands)


def from_file(file: Path, *, named_by: str) -> Iterator[Setting]:
    """Yields the settings of a TOML file. `named_by`: the flag or variable with its name, for errors."""
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ConfigError(f"{named_by}{file}: there is no such file") from exc
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"{named_by}{file}: cannot be read as TOML: {exc}") from exc
    for name, value in content.items():
        known_setting(name, shown=f"{file}: {name}", known={known: known for known in SETTINGS})
        yield Setting(name, converted(name, value, shown=f"{file}: {name}"), str(file))


def from_environment(environ: Mapping[str, str]) -> Iterator[Setting]:
    variables = {declared.variable: name for name, declared in SETTINGS.items()}
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
        yield Setting(name, converted(name, text, shown=f"{variable}={one_line(text)}"), variable)


def from_flags(flags: Mapping[str, object]) -> Iterator[Setting]:
    for name, value in flags.items():
        if value is not None:
            flag = SETTINGS[name].flag_for(value)
            if Mark.COMMAS in SETTINGS[name].marks and isinstance(value, list):
                value = ",".join(map(str, value))
            yield Setting(name, converted(name, value, shown=f"{flag} {one_line(str(value))}"), flag)


def arguments_of(values: Mapping[str, object], *, config: Path | None = None) -> list[str]:
    """Returns a TOML file and values of settings as a command line, without secrets: see `secrets_of`."""
    arguments = [] if config is None else ["--config", str(config)]
    for name, value in values.items():
        declared = SETTINGS[name]
        if isinstance(value, bool):
            arguments.append(declared.flag_for(value))
        elif not declared.secret:
            for item in value if isinstance(value, list | tuple) else [value]:
                arguments += [declared.flag, str(item)]
    return arguments


def secrets_of(values: Mapping[str, object]) -> dict[str, str]:
    """Returns the secrets among values of settings as variables of the environment, which other users cannot read."""
    secrets = {SETTINGS[name].variable: value for name, value in values.items() if SETTINGS[name].secret}
    return {
        variable: ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        for variable, value in secrets.items()
    }


def known_setting(text: str, *, shown: str, known: Mapping[str, str]) -> str:
    """Returns the setting that `text` names. `known` maps the names in a source to settings."""
    if text in known:
        return known[text]
    import difflib  # takes as long to import as the rest of this module

    prefix = ENVIRONMENT_PREFIX if text.startswith(ENVIRONMENT_PREFIX) else ""
    names = [name.removeprefix(prefix) for name in known]
    near = difflib.get_close_matches(text.removeprefix(prefix), names, n=1, cutoff=MIN_LIKENESS)
    hint = f"did you mean {prefix}{near[0]}?" if near else "`motet serve --help-all` and docs/settings.md list them"
    raise ConfigError(f"{shown}: there is no such setting; {hint}")


def converted(name: str, value: object, *, shown: str) -> object:
    """Returns the value in the setting's type. A text (from the environment) can be a number, bool or list."""
    declared = SETTINGS[name]
    kind = declared.kind
    if isinstance(value, str):
        value = VALUES.get(name, {}).get(value, value)
    if isinstance(value, str) and declared.is_list:
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(kind, type) and issubclass(kind, StrEnum) and value not in tuple(kind):
        raise ConfigError(f"{shown}: must be {declared.range}")
    try:
        return msgspec.convert(value, kind, strict=not isinstance(value, str))
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{shown}: must be {declared.requirement}") from exc
