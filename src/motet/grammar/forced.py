"""Finds grammars that can force a long text: a sequence of characters without any alternative.

Where only one text can follow, llguidance computes all of it again at every token, and allows only the tokens into
which the tokenizer splits it. This makes the fixed parts of an answer better, and takes half a millisecond for 1,000
characters. But a few characters can repeat a text a million times (`((a{100}){100}){100}`), which takes a second per
token, and 200 MB. A grammar that could force more than `MAX_FORCED` characters is therefore compiled with the option
`no_forcing`: any tokens that spell the text are then allowed.

The code here only computes a rough upper bound, the *reach* of a rule or schema: the lengths of all alternatives are
added up, and the minimum counts of all repetitions are multiplied.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from motet.grammar.schema.keywords import inner_schemas, target_of

MAX_FORCED: Final = 4_000
"""Maximum number of forced characters with forcing. They take two milliseconds per token at worst."""
NO_FORCING: Final = '\n%llguidance {"no_forcing": true}\n'
"""Text to append to a grammar. It goes to the end because the last of a grammar's options counts, and a client's
grammar can contain options too."""

_PARTS = re.compile(
    r"""
      (?P<comment>//[^\n]*|\#[^\n]*)
    | (?P<string>"(?:[^"\\\n]|\\.)*+"?)
    | (?P<regex>/(?:[^/\\\n]|\\.)*+/?)
    | (?P<json>%json\s*(?=\{))
    | (?P<nested>%lark\b)
    | ^[ \t]*[!?]?(?P<head>[\w-]+)(?:\.-?\d+)?(?:\[[^\]\n]*\]|\{[^}\n]*\})?[ \t]*:
    | [{~][ \t]*(?P<minimum>\d+)(?P<open>[ \t]*,[ \t]*\}|[ \t]*\.\.(?!\d))?
    | (?P<loop>[*+])
    | (?P<word>[\w-]+)
    """,
    re.VERBOSE | re.MULTILINE,
)
_MINIMUM = re.compile(r"\{(\d{1,9})")
_LOOP = re.compile(r"(?<!\.)(?<!\.\))[*+]|\{\d+,\}")
"""A repetition without an upper limit, except a repetition of `.`."""


def forces_much(lark: str) -> bool:
    """Returns True if this Lark grammar could force more than `MAX_FORCED` characters."""
    try:
        return _Rules(lark).reach("start") > MAX_FORCED
    except RecursionError:
        return True


def schema_forces_much(schema: Mapping[str, object]) -> bool:
    """Returns True if this schema, which has been checked, could force more than `MAX_FORCED` characters."""
    try:
        return _reach_of_schema(schema, schema, known={}) > MAX_FORCED
    except RecursionError:
        return True


class _Rules:
    """The rules of one Lark grammar."""

    def __init__(self, lark: str) -> None:
        self._chars = defaultdict[str, float](float)
        """Number of characters that each rule has itself."""
        self._times = defaultdict[str, float](lambda: 1.0)
        """Product of the minimum counts of all repetitions in each rule."""
        self._words = defaultdict[str, list[str]](list)
        """Words in each rule, some of them names of other rules."""
        self._reach: dict[str, float] = {}
        rule, at = "", 0
        while (found := _PARTS.search(lark, at)) is not None:
            at = found.end()
            if (head := found["head"]) is not None:
                rule = head
            elif (minimum := found["minimum"]) is not None:
                self._times[rule] *= max(1.0, float(minimum))
                self._chars[rule] += math.inf if found["open"] and _is_terminal(rule) else 0.0
            elif found["loop"] is not None:
                self._chars[rule] += math.inf if _is_terminal(rule) else 0.0
            elif (word := found["word"]) is not None:
                self._words[rule].append(word)
            elif found["json"] is not None:
                schema, at = json.JSONDecoder().raw_decode(lark, at)
                self._chars[rule] += _reach_of_schema(schema, schema, known={})
            elif found["regex"] is not None:
                # Two repetitions in a row can force a text without end: in `A A` with `A: /a+/`, no letter of the first
                # A can be its last one.
                self._chars[rule] += math.inf if _LOOP.search(found[0]) else _reach_of_regex(found[0])
            elif found["comment"] is None:
                self._chars[rule] += math.inf if found["nested"] else len(found[0])

    def reach(self, rule: str) -> float:
        """Returns an upper bound of the number of characters of the rule's text; infinity for a recursive rule."""
        if rule not in self._reach:
            self._reach[rule] = math.inf
            known = [word for word in self._words[rule] if word in self._chars or word in self._words]
            self._reach[rule] = (self._chars[rule] + sum(map(self.reach, known))) * self._times[rule]
        return self._reach[rule]


def _is_terminal(rule: str) -> bool:
    return rule[:1].isupper() or rule[:2].lstrip("_")[:1].isupper()


def _reach_of_regex(regex: str) -> float:
    return len(regex) * math.prod(max(1.0, float(minimum)) for minimum in _MINIMUM.findall(regex))


def _reach_of_schema(schema: object, root: Mapping[str, object], *, known: dict[int, float]) -> float:
    """Returns an upper bound of the number of characters that a schema forces. `known`: results by the ids of schemas;
    infinity for a schema whose result is being computed, because it is recursive."""
    if not isinstance(schema, dict):
        return 0.0
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = math.inf
    texts = [schema[key] for key in ("const", "minimum", "maximum", "format") if key in schema]
    fixed = max((len(json.dumps(value)) for value in schema.get("enum", ())), default=0)
    reach = fixed + sum(len(json.dumps(text)) for text in texts) + _minimum(schema, "minLength")
    reach += sum(len(json.dumps(name)) + 2 for name in schema.get("properties", ()))
    for pattern in (schema.get("pattern", ""), *schema.get("patternProperties", ())):
        reach += _reach_of_regex(pattern)
    for path, inner in inner_schemas(schema):
        if path[0] != "$defs":
            reach += _reach_of_schema(inner, root, known=known)
    if "$ref" in schema:
        reach += _reach_of_schema(target_of(schema["$ref"], root), root, known=known)
    repeats = max(1.0, _minimum(schema, "minItems")) * max(1.0, _minimum(schema, "minProperties"))
    known[id(schema)] = reach * repeats
    return known[id(schema)]


def _minimum(schema: Mapping[str, object], keyword: str) -> float:
    minimum = schema.get(keyword, 0)
    return float(min(minimum, 10**9)) if isinstance(minimum, int) else 0.0
