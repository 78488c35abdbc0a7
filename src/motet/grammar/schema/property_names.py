"""Replaces `propertyNames` by `patternProperties`, or by named properties."""

from collections.abc import Collection, Mapping

from motet.grammar.schema.formats import PATTERNS
from motet.grammar.schema.keywords import Schema, dict_at, is_any, list_at, resolved, types_of
from motet.grammar.schema.patterns import matches


def restrict_names(schema: Schema, root: Mapping[str, object]) -> object:
    """Changes `schema` so that the names of properties follow its `propertyNames`, and returns another schema that its
    values must follow. Returns None if no replacement is known."""
    names = resolved(schema["propertyNames"], root)
    if is_any(names):
        return True
    if names is False:
        return {"maxProperties": 0}
    if not isinstance(names, dict) or "patternProperties" in schema or "string" not in types_of(names):
        return None
    properties = dict_at(schema, "properties")
    for name in [*properties, *map(str, list_at(schema, "required"))]:
        allowed = _allows(names, name)
        if allowed is None:
            return None
        if not allowed:
            properties[name] = False
    schema["properties"] = properties
    additional = schema.get("additionalProperties", True)
    return (
        _restrict_additional(schema, names, additional=additional)
        if names.keys() - {"type"} and additional is not False
        else True
    )


def _restrict_additional(schema: Schema, names: Schema, *, additional: object) -> object:
    """Allows the additional properties only with names that a schema allows."""
    keywords = names.keys() - {"type"}
    if keywords <= {"const", "enum"}:
        listed = [names["const"]] if "const" in names else list_at(names, "enum")
        for name in (each for each in listed if isinstance(each, str) and _allows(names, each)):
            dict_at(schema, "properties").setdefault(name, additional)
    elif (pattern := _pattern(names, keywords)) is not None:
        schema["patternProperties"] = {pattern: additional}
    else:
        return None
    schema["additionalProperties"] = False
    return True


def _pattern(names: Mapping[str, object], keywords: Collection[str]) -> str | None:
    """Returns a pattern for the names that a schema allows; None if one pattern cannot say it."""
    if set(keywords) == {"pattern"}:
        return str(names["pattern"])
    if set(keywords) == {"format"}:
        return PATTERNS.get(str(names["format"]))
    if set(keywords) <= {"minLength", "maxLength"}:
        return f"^[\\s\\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None


def _allows(names: Mapping[str, object], name: str) -> bool | None:
    """Returns True if the schema of names allows a name, and None if this is not certain."""
    for key, value in names.items():
        if key == "type":
            fits = True  # the caller has checked it
        elif key == "const":
            fits = name == value
        elif key == "enum":
            fits = isinstance(value, list) and name in value
        elif key == "minLength" and isinstance(value, int):
            fits = len(name) >= value
        elif key == "maxLength" and isinstance(value, int):
            fits = len(name) <= value
        elif key == "pattern" or (key == "format" and value in PATTERNS):
            matched = matches(str(value) if key == "pattern" else PATTERNS[str(value)], name)
            if matched is None:
                return None
            fits = matched
        else:
            return None
        if not fits:
            return False
    return True
