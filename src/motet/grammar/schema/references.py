"""References of the normal form, all of which are `#` or `#/$defs/NAME`."""

from collections.abc import Mapping
from typing import Final

from motet.grammar.schema.keywords import dict_at

PREFIX: Final = "#/$defs/"


def target_of(ref: str, root: Mapping[str, object]) -> object:
    """Returns the schema that a reference of the normal form leads to."""
    return root if ref == "#" else dict_at(root, "$defs")[ref.removeprefix(PREFIX)]
