"""References of the normal form, all of which are `#` or `#/$defs/NAME`."""

from collections.abc import Mapping
from typing import Final

from motet.grammar.schema.keywords import dict_at

PREFIX: Final = "#/$defs/"


def target_of(ref: str, root: Mapping[str, object]) -> object:
    """Returns the schema that a reference of the normal form leads to."""
    return root if ref == "#" else dict_at(root, "$defs")[ref.removeprefix(PREFIX)]


def resolved(schema: object, root: Mapping[str, object]) -> object:
    """Returns the schema that a schema with nothing but a reference leads to, through further such schemas. Returns
    True if they refer to one another in a circle, which allows every value."""
    visited = set[int]()
    while isinstance(schema, dict) and schema.keys() == {"$ref"}:
        if id(schema) in visited:
            return True
        visited.add(id(schema))
        schema = target_of(str(schema["$ref"]), root)
    return schema
