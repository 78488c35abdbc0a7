"""The configuration of a PEFT adapter (`adapter_config.json`): the linear layers it changes, their ranks and scalings.

Patterns and suffixes match as in PEFT 0.21. Fields that change results and are not implemented are refused by name, and
so are unknown fields unless they are unset, zero or empty.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from motet.engines.native.adapters.low_rank import unusable
from motet.errors import RequestError
from motet.log import cut

T = TypeVar("T")

ALL_LINEAR = "all-linear"
WITHOUT_EFFECT = frozenset(
    {"auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "fan_in_fan_out"}
    | {"inference_mode", "init_lora_weights", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config"}
    | {"megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"}
)
"""Fields without effect on adapters of linear layers. `fan_in_fan_out` is for transposed layers."""
READ = frozenset(
    {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules", "bias"}
    | {"layers_to_transform", "layers_pattern"}
)
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` that change the base model's weights."""
MAX_VALUE_CHARS = 100
DEFAULT = 8
"""PEFT's default value of `r` and `lora_alpha`."""
MAX_NUMBER = 1e6
"""Maximum value of a rank or an alpha."""


@dataclass(frozen=True)
class PeftConfig:
    """The fields of a configuration that are used."""

    source: str
    """Name of the file in messages."""
    rank: int
    alpha: float
    rslora: bool
    ranks: Mapping[str, int]
    """Ranks of some layers, by patterns of their names."""
    alphas: Mapping[str, float]
    targets: str | Sequence[str]
    excluded: str | Sequence[str]
    layers: Sequence[int]
    """Numbers of the decoder layers that have adapters; empty for all."""
    layers_patterns: Sequence[str]
    base: str
    """Name of the base model; can be empty."""

    def rank_of(self, linear: str) -> int:
        return _by_pattern(self.ranks, linear, default=self.rank)

    def scaling_of(self, linear: str) -> float:
        """Returns alpha / rank, or alpha / sqrt(rank) for rsLoRA (Kalajdzievski, 2023)."""
        rank = self.rank_of(linear)
        return _by_pattern(self.alphas, linear, default=self.alpha) / (math.sqrt(rank) if self.rslora else rank)

    def changes(self, linear: str) -> bool:
        """Returns True if the adapter changes a linear layer. `all-linear` includes the output embedding here."""
        if _matches(self.excluded, linear) or not (self.targets == ALL_LINEAR or _matches(self.targets, linear)):
            return False
        if not self.layers or isinstance(self.targets, str) or linear in self.targets:
            return True
        patterns = self.layers_patterns or [r"[^.]*"]
        found = (re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", linear) for pattern in patterns)
        layer = next((match for match in found if match is not None), None)
        return layer is not None and int(layer[1]) in self.layers


def read_peft_config(values: Mapping[str, object], source: str) -> PeftConfig:
    """Returns the configuration of an adapter. Raises RequestError, which names the field, if it cannot be used."""
    fields = _Fields(source, values)
    if values.get("peft_type") != "LORA":
        raise fields.refusal("peft_type", "only LORA is implemented")
    for name, value in values.items():
        if value and name not in WITHOUT_EFFECT | READ:
            raise fields.refusal(name, "this field is not implemented")
    if values.get("bias", "none") != "none":
        raise fields.refusal("bias", "only 'none' is implemented")
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        advice = "convert the adapter with PEFT's `path_initial_model_for_weight_conversion`"
        raise fields.refusal("init_lora_weights", f"this changes the weights of the base model: {advice}")
    layers_pattern = fields.texts("layers_pattern")
    config = PeftConfig(
        source,
        rank=fields.rank("r"),
        alpha=fields.number("lora_alpha"),
        rslora=bool(values.get("use_rslora")),
        ranks=fields.ranks("rank_pattern"),
        alphas=fields.numbers_by_pattern("alpha_pattern"),
        targets=fields.texts("target_modules"),
        excluded=fields.texts("exclude_modules"),
        layers=fields.numbers("layers_to_transform"),
        layers_patterns=[layers_pattern] if isinstance(layers_pattern, str) else layers_pattern,
        base=str(values.get("base_model_name_or_path") or ""),
    )
    if not config.targets:
        raise fields.refusal("target_modules", "no linear layer is named")
    _check_patterns(config)
    return config


@dataclass(frozen=True)
class _Fields:
    """The fields of a file, whose values can have any type."""

    source: str
    values: Mapping[str, object]

    def refusal(self, name: str, why: str) -> RequestError:
        value = cut(repr(self.values.get(name)), MAX_VALUE_CHARS)
        return unusable(f"{self.source}: {cut(name, MAX_VALUE_CHARS)} is {value}; {why}")

    def number(self, name: str) -> float:
        value = self.values.get(name, DEFAULT)
        return self._checked(name, value)

    def rank(self, name: str) -> int:
        value = self.values.get(name, DEFAULT)
        return self._checked_rank(name, value)

    def ranks(self, name: str) -> dict[str, int]:
        return {key: self._checked_rank(name, value) for key, value in self._object(name).items()}

    def numbers_by_pattern(self, name: str) -> dict[str, float]:
        return {key: self._checked(name, value) for key, value in self._object(name).items()}

    def texts(self, name: str) -> str | list[str]:
        value = self.values.get(name) or []
        if isinstance(value, str):
            return ALL_LINEAR if value.lower() == ALL_LINEAR else value
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.refusal(name, "it must be a string or a list of strings")
        return value

    def numbers(self, name: str) -> list[int]:
        value = self.values.get(name)
        numbers = [] if value is None else [value] if type(value) is int else value
        if not isinstance(numbers, list) or not all(type(one) is int for one in numbers):
            raise self.refusal(name, "it must be an integer or a list of integers")
        return numbers

    def _object(self, name: str) -> dict[str, object]:
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise self.refusal(name, "it must be an object")
        return value

    def _checked(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
            raise self.refusal(name, f"each value must be a number of at most {MAX_NUMBER:g}")
        return float(value)

    def _checked_rank(self, name: str, value: object) -> int:
        if type(value) is not int or not 1 <= value <= MAX_NUMBER:
            raise self.refusal(name, "each value must be a positive integer")
        return value


def _by_pattern(patterns: Mapping[str, T], linear: str, *, default: T) -> T:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", linear)), default)


def _matches(names: str | Sequence[str], linear: str) -> bool:
    """Returns True if a linear layer matches a regular expression, or one of several names or suffixes."""
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, linear) is not None
    return any(linear == name or linear.endswith(f".{name}") for name in names)


def _check_patterns(config: PeftConfig) -> None:
    texts = [one for one in (config.targets, config.excluded) if isinstance(one, str)]
    for pattern in (*texts, *config.layers_patterns, *config.ranks, *config.alphas):
        try:
            re.compile(rf"(.*\.)?({pattern})$")
        except re.error as error:
            shown = cut(repr(pattern), MAX_VALUE_CHARS)
            raise unusable(f"{config.source}: {shown} is not a regular expression: {error}") from error
