"""Finds grammars that may leave an answer no choice for a long stretch of text.

Where only one text may follow, llguidance writes it out to its end at every token, and allows only the tokens that a
tokenizer makes of it. That is good for the words of a form, and takes half a millisecond for 1,000 characters. But a
few characters may repeat a text a million times (`((a{100}){100}){100}`): a second a token, and 200 MB. So a grammar
that could force more than `MAX_FORCED` characters is compiled without it: then any tokens that spell the text may come.

Nothing is worked out here but a bound, and a rough one: all alternatives of a rule are added up, and the least numbers
of all repetitions in it are multiplied.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Final

from motet.errors import GrammarError
from motet.grammar.json_schema import inner_schemas, target

MAX_FORCED: Final = 4_000
"""Two milliseconds a token at worst."""
NO_FORCING: Final = '\n%llguidance {"no_forcing": true}\n'
"""Behind a grammar: the last one of a grammar's options counts, and a client may write some too."""

_PARTS = re.compile(
    r"""
      (?P<comment>//[^\n]*|\#[^\n]*)
    | (?P<string>"(?:[^"\\\n]|\\.)*+"?)
    | (?P<regex>/(?:[^/\\\n]|\\.)*+/?)
    | (?P<json>%json\s*(?=\{))
    | (?P<nested>%lark\b)
    | ^[ \t]*[!?]?(?P<head>[\w-]+)(?:\.-?\d+)?(?:\[[^\]\n]*\]|\{[^}\n]*\})?[ \t]*:
    | [{~][ \t]*(?P<least>\d+)(?P<open>[ \t]*,[ \t]*\}|[ \t]*\.\.(?!\d))?
    | (?P<loop>[*+])
    | (?P<word>[\w-]+)
    """,
    re.VERBOSE | re.MULTILINE,
)
_LEAST = re.compile(r"\{(\d{1,9})")
_LOOP = re.compile(r"(?<!\.)(?<!\.\))[*+]|\{\d+,\}")
"""A part that may be repeated without end, unless it is any character."""


def forces_much(lark: str) -> bool:
    """Returns True if an answer in this Lark could have a long stretch without a choice."""
    try:
        return _Rules(lark).reach("start") > MAX_FORCED
    except RecursionError:
        return True


def schema_forces_much(schema: Mapping[str, object]) -> bool:
    """Returns True if a value of this schema, which has been checked, could have such a stretch."""
    try:
        return _reach_of_schema(schema, schema, known={}) > MAX_FORCED
    except RecursionError:
        return True


class _Rules:
    """The rules of one grammar: what each has of its own, and which others it has."""

    def __init__(self, lark: str) -> None:
        self._chars: dict[str, float] = {}
        self._times: dict[str, float] = {}
        self._words: dict[str, list[str]] = {}
        self._reach: dict[str, float] = {}
        rule, at = "", 0
        while (found := _PARTS.search(lark, at)) is not None:
            at = found.end()
            if (head := found["head"]) is not None:
                rule = head
            elif (least := found["least"]) is not None:
                self._times[rule] = self._times.get(rule, 1.0) * max(1.0, float(least))
                self._add(rule, math.inf if found["open"] and _is_terminal(rule) else 0.0)
            elif found["loop"] is not None:
                self._add(rule, math.inf if _is_terminal(rule) else 0.0)
            elif (word := found["word"]) is not None:
                self._words.setdefault(rule, []).append(word)
            elif found["json"] is not None:
                schema, at = json.JSONDecoder().raw_decode(lark, at)
                self._add(rule, _reach_of_schema(schema, schema, known={}))
            elif found["regex"] is not None:
                # Several in a row have no end: `A A` with `A: /a+/` is a text of which no letter may be the last.
                self._add(rule, math.inf if _LOOP.search(found[0]) else _reach_of_regex(found[0]))
            elif found["comment"] is None:
                self._add(rule, math.inf if found["nested"] else len(found[0]))

    def reach(self, rule: str) -> float:
        """Returns the most characters of the rule's text, infinite for one that has itself in it."""
        if rule not in self._reach:
            self._reach[rule] = math.inf
            known = (word for word in self._words.get(rule, ()) if word in self._chars or word in self._words)
            chars = self._chars.get(rule, 0.0) + sum(map(self.reach, known))
            self._reach[rule] = chars * self._times.get(rule, 1.0)
        return self._reach[rule]

    def _add(self, rule: str, chars: float) -> None:
        self._chars[rule] = self._chars.get(rule, 0.0) + chars


def _is_terminal(rule: str) -> bool:
    return rule[:1].isupper() or rule[:2].lstrip("_")[:1].isupper()


def _reach_of_regex(regex: str) -> float:
    times = 1.0
    for least in _LEAST.findall(regex):
        times *= max(1.0, float(least))
    return len(regex) * times


def _reach_of_schema(schema: object, root: object, *, known: dict[int, float]) -> float:
    """`known`: the results so far, by the ids of the schemas; infinite for one that is under way."""
    if not isinstance(schema, dict):
        return 0.0
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = math.inf
    texts = [schema[key] for key in ("const", "minimum", "maximum", "format") if key in schema]
    fixed = max((len(json.dumps(value)) for value in schema.get("enum", ())), default=0)
    reach = fixed + sum(len(json.dumps(text)) for text in texts) + _least(schema, "minLength")
    reach += sum(len(json.dumps(name)) + 2 for name in schema.get("properties", ()))
    for pattern in (schema.get("pattern", ""), *schema.get("patternProperties", ())):
        reach += _reach_of_regex(pattern)
    for path, inner in inner_schemas(schema):
        if path[0] not in ("$defs", "definitions"):
            reach += _reach_of_schema(inner, root, known=known)
    if "$ref" in schema:
        reach += _reach_of_ref(schema["$ref"], root, known=known)
    known[id(schema)] = reach * max(1.0, _least(schema, "minItems")) * max(1.0, _least(schema, "minProperties"))
    return known[id(schema)]


def _reach_of_ref(ref: str, root: object, *, known: dict[int, float]) -> float:
    try:
        found = target((), root, ref=ref).schema
    except GrammarError:
        return math.inf
    return _reach_of_schema(found, root, known=known)


def _least(schema: Mapping[str, object], keyword: str) -> float:
    least = schema.get(keyword, 0)
    return float(min(least, 10**9)) if isinstance(least, int) else 0.0
