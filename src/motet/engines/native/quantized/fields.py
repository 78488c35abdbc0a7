"""Reads the fields of a `quantization_config`. Errors name the field and its value."""

from collections.abc import Mapping

from motet.errors import UnsupportedModelError
from motet.log import cut

MAX_VALUE_CHARS = 200
"""Maximum length of a value in messages."""


class Fields:
    """The fields of a JSON object in a config."""

    def __init__(self, content: Mapping[str, object], where: str) -> None:
        """`where`: the object's name in messages."""
        self._content = content
        self._where = where

    def get(self, name: str) -> object:
        return self._content.get(name)

    def refused(self, name: str, allowed: str) -> UnsupportedModelError:
        value = cut(repr(self._content.get(name)), MAX_VALUE_CHARS)
        return UnsupportedModelError(f"{self._where}: {name} is {value}, which is not supported; it can be {allowed}")

    def text(self, name: str, allowed: tuple[str, ...], *, default: str | None = None) -> str:
        """Returns one of the allowed values; `default` if the field is missing or null."""
        value = self._content.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or value.lower() not in allowed:
            raise self.refused(name, ", ".join(allowed))
        return value.lower()

    def number(self, name: str, allowed: tuple[int, ...], *, default: int | None = None) -> int:
        """Returns one of the allowed values; `default` if the field is missing or null."""
        value = self._content.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or value not in allowed:
            raise self.refused(name, ", ".join(map(str, allowed)))
        return value

    def size(self, name: str) -> int:
        """Returns a positive integer, or -1."""
        value = self._content.get(name)
        if type(value) is not int or not (value == -1 or 1 <= value < 2**31):
            raise self.refused(name, "a positive integer, or -1")
        return value

    def pair(self, name: str) -> tuple[int, int] | None:
        """Returns two positive integers; None if the field is missing or null."""
        value = self._content.get(name)
        if value is None:
            return None
        if not (isinstance(value, list) and len(value) == 2 and all(type(n) is int and 0 < n < 2**31 for n in value)):
            raise self.refused(name, "two positive integers")
        return value[0], value[1]

    def object(self, name: str) -> "Fields":
        """Returns the fields of an object; no fields if it is missing or null."""
        value = self._content.get(name)
        if not isinstance(value, dict | None):
            raise self.refused(name, "an object")
        return Fields(value or {}, f"{self._where}.{name}")

    def names(self) -> list[str]:
        return [*self._content]

    def empty(self, *names: str) -> None:
        """Raises UnsupportedModelError unless these fields are missing, null, false or empty."""
        for name in names:
            if self._content.get(name):
                raise self.refused(name, "unset or empty")


def groups_text(group_size: int) -> str:
    return "one group per column" if group_size == -1 else f"groups of {group_size}"
