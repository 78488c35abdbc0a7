"""Formats of strings: which are enforced, and how.

A format of `LLGUIDANCE` is enforced by llguidance, a format of `PATTERNS` becomes a pattern. All other formats are
annotations, as the standard allows, and so is every format of a schema without strings.

The patterns are stricter than llguidance's formats of the same names, which accept days that a month does not have, the
year 0, seconds greater than 59, fractions without limit, and names in Punycode.
"""

from typing import Final

from motet.grammar.schema.keywords import Schema, list_at, types_of

MAX_HOST_CHARS: Final = 253
LLGUIDANCE: Final = frozenset(["duration", "email", "ipv4", "ipv6", "uri", "uuid"])

_LEAP_YEAR = "(?:[0-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9][0-9]|00[1-9][0-9]|000[1-9])"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# At most 63 characters, no hyphen at either end, and no two hyphens at the third and fourth place, as in `xn--`.
_LABEL = (
    "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,2}[a-zA-Z0-9]"
    "|[a-zA-Z0-9-](?:[a-zA-Z0-9][a-zA-Z0-9-]|-[a-zA-Z0-9])[a-zA-Z0-9-]{0,58}[a-zA-Z0-9])?"
)

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
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "time": f"^{_TIME}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
    "uri-reference": f"^{_reference('')}$",
    "iri-reference": f"^{_reference(LETTERS)}$",
    "uri-template": f"^(?:{_LITERAL}|{_EXPRESSION})*$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
}
"""Patterns that replace formats. Times are as Python parses them (ISO 8601), with an offset as in RFC 3339."""
ALIASES: Final = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri"}
"""Formats that have the stricter format for ASCII in their place."""


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
