"""The default values of sampling fields, which apply if a request omits the field.

    generation_config.json of the model, or of another folder
            │  --override-generation-config replaces values, or removes them with null
            ▼
    EngineInfo.default_sampling_params ──► the server or gateway that plans a request (`generation.plan`)

Fields of `SamplingParams` that can have a default are declared with `SamplingField.generation_config`. As in vLLM, all
other members of the file are ignored, also `do_sample`."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, get_type_hints

from motet.errors import ConfigError
from motet.log import cut
from motet.settings.parsed_values import json_object
from motet.types import SAMPLING_FIELDS, SamplingParams

GENERATION_CONFIG: Final = "generation_config.json"
AUTO: Final = "auto"
"""Value of `--generation-config` for the model's own file."""
NONE: Final = ("none", "vllm")
"""Values of `--generation-config` for no defaults. vLLM's own name is the second one."""

MAX_SHOWN_CHARS: Final = 100

Defaults = Mapping[str, int | float]
"""Default values by the names of fields in `SamplingParams`."""
Override = Mapping[str, int | float | None]
"""Values that replace defaults; None removes a default."""
NO_OVERRIDE: Final[Override] = {}

FIELD_NAMES: Final[Mapping[str, str]] = {
    declared.generation_config: name for name, declared in SAMPLING_FIELDS.items() if declared.generation_config
}
"""Name in `generation_config.json` -> name in `SamplingParams`."""
_TYPES: Final = get_type_hints(SamplingParams)


def read_override(texts: Iterable[str]) -> dict[str, int | float | None]:
    """Parses the JSON object of `--override-generation-config`; a null removes a default. Raises ConfigError."""
    value = json_object(texts)
    if unknown := [name for name in value if name not in FIELD_NAMES]:
        raise ConfigError(f"{unknown[0]!r} is not one of the fields {', '.join(FIELD_NAMES)}")
    removed = {FIELD_NAMES[name]: None for name, number in value.items() if number is None}
    return {**read_defaults(value), **removed}


def read_defaults(values: Mapping[str, object]) -> dict[str, int | float]:
    """Returns the defaults in the members of a `generation_config.json`; a null counts as absent. Raises ConfigError
    that names the member whose value is not allowed."""
    return {
        name: _checked(given, values[given], name=name)
        for given, name in FIELD_NAMES.items()
        if values.get(given) is not None
    }


def _checked(given: str, value: object, *, name: str) -> int | float:
    declared, kind = SAMPLING_FIELDS[name], _TYPES[name]
    number = int(value) if kind is int and isinstance(value, float) and value.is_integer() else value
    if name == "top_k" and number == -1:
        return 0  # both mean off
    if isinstance(number, bool) or not isinstance(number, int if kind is int else int | float):
        number = math.nan
    if not declared.allows(number):
        raise ConfigError(f"{given!r} is {cut(repr(value), MAX_SHOWN_CHARS)}, and must be a number: {declared.words}")
    return float(number) if kind is float else number


def faulty_default(values: Defaults) -> str | None:
    """Returns the name of a field that cannot have this default, or whose value is not allowed; None if all can."""
    names = set(FIELD_NAMES.values())
    return next((name for name, value in values.items() if name not in names or not _fits(name, value)), None)


def _fits(name: str, value: int | float) -> bool:
    return SAMPLING_FIELDS[name].allows(value) and (_TYPES[name] is float or type(value) is int)


def merged(values: Defaults, override: Override) -> dict[str, int | float]:
    """Returns the values with the override's values in their place."""
    return {name: value for name, value in {**values, **override}.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class DefaultRules:
    """The settings of a gateway for the defaults of its models."""

    replaced: Defaults | None = None
    """Defaults in place of those that the workers report; None for the workers'."""
    override: Override = field(default_factory=dict)

    def values(self, reported: Defaults | None) -> dict[str, int | float]:
        """Returns the defaults of a model whose workers report these; None if they report none."""
        return merged((reported or {}) if self.replaced is None else self.replaced, self.override)

    def unknown(self, reported: Defaults | None) -> frozenset[str]:
        """Returns the fields for which only the workers know the default."""
        if reported is not None or self.replaced is not None:
            return frozenset()
        return frozenset(FIELD_NAMES.values()) - self.override.keys()
