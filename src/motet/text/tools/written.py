"""A call whose arguments come one by one, each written as text of its own kind, made into one JSON object."""

import json

from motet.text.tools.base import ReadCall, Tool
from motet.text.tools.cursor import Cursor, EndOfText, NotACall
from motet.text.tools.typed import as_json, property_schema, quoted_json, types_of


class WrittenCall:
    """Grows with each argument that is read."""

    def __init__(self, tool: Tool) -> None:
        self.tool = tool
        self._keys: set[str] = set()
        self._json = ""

    def argument(self, cursor: Cursor, key: str, end: str, *, own_lines: bool) -> None:
        """The argument `key`, whose text goes on to the tag `end`; `own_lines`: tags stand on lines of their own.

        At the end of the text the beginning of a string is added before `EndOfText` is raised.
        """
        if key in self._keys:
            raise NotACall
        self._keys.add(key)
        types = types_of(property_schema(self.tool, key), self.tool.parameters)
        lead = f"{', ' if self._json else ''}{json.dumps(key, ensure_ascii=False)}: "
        start = cursor.place + (own_lines and cursor.text.startswith("\n", cursor.place))
        try:
            _pass_value(cursor, end, types)
        except EndOfText:
            if types == {"string"}:
                sure = _without_beginning_of(cursor.text[start:], f"\n{end}" if own_lines else end)
                self._json += lead + quoted_json(sure)[:-1]
            raise
        text = cursor.text[min(start, cursor.place) : cursor.place]
        self._json += lead + as_json(text.removesuffix("\n") if own_lines else text, types)
        cursor.literal(end)

    def call(self, *, whole: bool) -> ReadCall:
        return ReadCall(self.tool.name, f"{{{self._json}{'}' if whole else ''}", whole)


def _pass_value(cursor: Cursor, end: str, types: frozenset[str]) -> None:
    """To the tag `end`; one in a string of JSON ends nothing."""
    start = cursor.place
    if "string" not in types:
        try:
            if not cursor.value().whole:
                raise EndOfText
        except NotACall:
            cursor.place = start
    cursor.until(end)


def _without_beginning_of(text: str, end: str) -> str:
    """Without what may become `end`, or its part after a line break."""
    for length in range(min(len(end) - 1, len(text)), 0, -1):
        tail = text[-length:]
        if end.startswith(tail) or end.removeprefix("\n").startswith(tail):
            return text[:-length]
    return text
