"""Parsers of settings whose value is a JSON object, or has a number for each API key."""

import json
import re
from collections.abc import Iterable

from motet.errors import ConfigError

INTEGER = re.compile(r"-?[0-9]{1,18}")
WEIGHT = re.compile(r"[0-9]{1,3}(\.[0-9]{1,9})?")
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
"""Bounds of the weight of one client's requests."""


def integers_by_key(texts: Iterable[str]) -> dict[str, int]:
    """Parses `KEY=NUMBER`, with the number after the last `=`. Raises ConfigError, which does not show the key."""
    found = {}
    for text in texts:
        key, equals, number = text.rpartition("=")
        if not (equals and key.strip() and INTEGER.fullmatch(number)):
            raise ConfigError("it is not KEY=NUMBER, such as secret=-10")
        found[key] = int(number)
    return found


def weights_by_key(texts: Iterable[str]) -> dict[str, float]:
    """Parses `KEY=WEIGHT`, with the weight after the last `=`. Raises ConfigError, which does not show the key."""
    found = {}
    for text in texts:
        key, equals, weight = text.rpartition("=")
        if not (equals and key.strip() and WEIGHT.fullmatch(weight) and MIN_WEIGHT <= float(weight) <= MAX_WEIGHT):
            raise ConfigError(f"it is not KEY=WEIGHT with a weight from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
        found[key] = float(weight)
    return found


def json_object(texts: Iterable[str]) -> dict[str, object]:
    """Parses a JSON object. Raises ConfigError."""
    (text,) = texts
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"it is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ConfigError("it is JSON, but not an object")
    return value
