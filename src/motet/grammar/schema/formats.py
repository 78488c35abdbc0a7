"""Formats of strings: which are enforced, and how.

A format of `LLGUIDANCE` is enforced by llguidance, a format of `PATTERNS` becomes a pattern. All other formats are
annotations, as the standard allows, and so is every format of a schema without strings.

The patterns are stricter than llguidance's formats of the same names, which accept days that a month does not have, the
year 0, seconds greater than 59, fractions without limit, and names in Punycode.
"""

from typing import Final

from motet.grammar.schema.keywords import Schema, list_at, types_of
from motet.text.tools.patterns import ALIASES, DATE, HOSTNAME, MAX_HOST_CHARS, TIME

LLGUIDANCE: Final = frozenset(["duration", "email", "ipv4", "ipv6", "uri", "uuid"])

LETTERS: Final = "\u00a0-\ud7ff"
"""Letters outside of ASCII that an IRI can have."""
_VARIABLE = r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*(?::[1-9][0-9]{0,2}|\*)?"
_LITERAL = r"[A-Za-z0-9._~:/?#@!$&()*+,;=\[\]-]|%[0-9A-Fa-f]{2}"
_EXPRESSION = rf"\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}}"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"


def _reference(letters: str) -> str:
    """Returns a pattern for a URI or a relative reference (RFC 3986) with these additional letters. The host is a
    name."""
    no_colon = f"(?:[A-Za-z0-9._~!$&'()*+,;=@{letters}-]|%[0-9A-Fa-f]{{2}})"
    in_path = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@{letters}-]|%[0-9A-Fa-f]{{2}})"
    in_host = f"(?:[A-Za-z0-9._~!$&'()*+,;={letters}-]|%[0-9A-Fa-f]{{2}})"
    in_query = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?{letters}-]|%[0-9A-Fa-f]{{2}})"
    network = f"//(?:{in_host}*@)?{in_host}*(?::[0-9]*)?(?:/{in_path}*)*"
    absolute = f"/(?:{in_path}+(?:/{in_path}*)*)?"
    with_scheme = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{network}|{absolute}|{in_path}+(?:/{in_path}*)*|)"
    relative = f"(?:{network}|{absolute}|{no_colon}+(?:/{in_path}*)*|)"
    return f"(?:{with_scheme}|{relative})(?:[?]{in_query}*)?(?:#{in_query}*)?"


PATTERNS: Final = {
    "date": f"^{DATE}$",
    "date-time": f"^{DATE}T{TIME}$",
    "time": f"^{TIME}$",
    "hostname": f"^{HOSTNAME}$",
    "uri-reference": f"^{_reference('')}$",
    "iri-reference": f"^{_reference(LETTERS)}$",
    "uri-template": f"^(?:{_LITERAL}|{_EXPRESSION})*$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
}
"""Patterns that replace formats."""


def enforce_format(schema: Schema) -> None:
    """Replaces or removes the format of one schema, but not of the schemas inside it."""
    named = schema.get("format")
    if named in ALIASES:
        named = schema["format"] = ALIASES[str(named)]
    if named is None or (named in LLGUIDANCE and "string" in types_of(schema)):
        return
    del schema["format"]
    pattern = PATTERNS.get(str(named))
    if pattern is None or "string" not in types_of(schema):
        return
    if named == "hostname":
        maximum = schema.get("maxLength")
        schema["maxLength"] = min(maximum, MAX_HOST_CHARS) if isinstance(maximum, int) else MAX_HOST_CHARS
    if "pattern" not in schema:
        schema["pattern"] = pattern
        return
    own_type = {"type": schema["type"]} if "type" in schema else {}
    schema["allOf"] = [*list_at(schema, "allOf"), {"pattern": pattern, **own_type}]
