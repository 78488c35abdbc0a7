"""LoRA adapters in settings, as `NAME=FOLDER`, and the checks of a folder before a model is loaded."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from motet.errors import ConfigError

ADAPTER_NAME = re.compile(r"[^\s=,/](?:[^\s=,]*[^\s=,/])?")
"""The allowed names: without white space, which headers and log lines separate fields with, and without a slash at the
ends. `=` and `,` separate the parts of settings."""
MAX_NAME_CHARS = 256


@dataclass(frozen=True)
class NamedAdapter:
    name: str
    path: str


def named_adapters(texts: Iterable[str]) -> list[NamedAdapter]:
    """Parses `NAME=FOLDER`. Raises ConfigError."""
    found: list[NamedAdapter] = []
    for text in texts:
        name, equals, path = text.partition("=")
        if not (equals and path.strip()):
            raise ConfigError(f"{text!r} is not NAME=FOLDER, such as sql=/adapters/sql")
        if why := name_fault(name):
            raise ConfigError(f"{name[:MAX_NAME_CHARS]!r} cannot be the name of an adapter: {why}")
        if any(name == other.name for other in found):
            raise ConfigError(f"the name {name!r} is given to two adapters")
        found.append(NamedAdapter(name, path))
    return found


def check_adapters(texts: Iterable[str]) -> None:
    """Raises ConfigError if a text is not `NAME=FOLDER`, or if a name occurs twice."""
    named_adapters(texts)


def name_fault(name: str) -> str:
    """Returns the reason why this cannot be the name of an adapter; empty if it can."""
    if not name or len(name) > MAX_NAME_CHARS:
        return f"a name has 1 to {MAX_NAME_CHARS} characters"
    if not name.isprintable() or ADAPTER_NAME.fullmatch(name) is None:
        return "a name has no white space, no '=' or ',', and no '/' at its ends"
    return ""
