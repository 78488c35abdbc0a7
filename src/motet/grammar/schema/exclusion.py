"""Replaces `oneOf`, which llguidance enforces only for parts that are obviously different, by `anyOf`.

Parts that exclude one another (`disjoint`) stay as they are. Of two other parts, each gets the complement of the other
one (`negation`). The schema before its objects were closed decides: a value of one closed part can follow another open
part.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Final

from motet.grammar.schema.disjoint import Disjointness
from motet.grammar.schema.keywords import (
    NARROWED,
    TYPES,
    Path,
    Schema,
    all_schemas,
    dict_at,
    list_at,
    resolved,
    schema_error,
)
from motet.grammar.schema.negation import Complements, all_of

ONE_OF: Final = (
    "it is not certain that the parts of 'oneOf' exclude one another; use 'anyOf', or make each part an object with a "
    "required property that has a different string ('const') in each part"
)
MANY: Final = 24
"""Number of parts from which a property with a different constant in each part is searched for first."""


def exclude_others(root: Schema, *, open_root: Schema | None = None) -> None:
    """Replaces each `oneOf` in place. Raises `GrammarError` at one that has no replacement. `open_root`: the schema
    before its objects were closed; None if they were not."""
    open_root = root if open_root is None else open_root
    disjointness, complements = Disjointness(open_root), Complements(open_root)
    as_sent = dict(_one_ofs(open_root))
    for path, schema in _one_ofs(root):
        parts = list_at(schema, "oneOf")
        del schema["oneOf"]
        names = [_closed_names(part, root) for part in parts]
        open_parts = parts if open_root is root else list_at(as_sent.get(path, schema), "oneOf")
        extra = exclusions(open_parts, names=names, disjointness=disjointness, complements=complements)
        if extra is None or len(open_parts) != len(parts):
            raise schema_error((*path, "oneOf"), ONE_OF)
        parts = [all_of([part, *each]) for part, each in zip(parts, extra, strict=True)]
        if "anyOf" in schema:
            schema["allOf"] = [*list_at(schema, "allOf"), {"anyOf": parts}]
        else:
            schema["anyOf"] = parts


def _one_ofs(root: Schema) -> list[tuple[Path, Schema]]:
    """Returns the schemas with `oneOf`, with their paths."""
    return [(path, each) for path, each in all_schemas(root) if isinstance(each, dict) and "oneOf" in each]


def exclusions(
    parts: Sequence[object],
    *,
    names: Sequence[Sequence[str] | None],
    disjointness: Disjointness,
    complements: Complements,
) -> Sequence[Sequence[object]] | None:
    """Returns schemas for each part that its values must follow too, so that they follow no other part; None if there
    are none. `names`: the names that properties of the values of each part can have; None for any."""
    if len(parts) >= MANY and _has_discriminator(parts, disjointness):
        return [[]] * len(parts)
    others: dict[int, list[int]] = {at: [] for at in range(len(parts))}
    shared: dict[int, frozenset[str]] = {at: frozenset() for at in range(len(parts))}
    """Types whose values are all allowed by the part and by another one."""
    for pair in combinations(range(len(parts)), 2):
        types = disjointness.common_types([parts[at] for at in pair])
        all_shared = frozenset(
            name for name in types if not any(disjointness.constrains(parts[at], name) for at in pair)
        )
        if disjointness.exhausted:
            return None
        for one, other in (pair, pair[::-1]):
            shared[one] |= all_shared
            if types - all_shared:
                others[one].append(other)
    found: list[Sequence[object]] = []
    for at, overlapping in others.items():
        excluded = [complements.of(parts[other], names=names[at]) for other in overlapping]
        if any(each is None for each in excluded):
            return None
        found.append([_without(shared[at]), *excluded])
    return found


def _without(types: frozenset[str]) -> object:
    """Returns a schema for the values of all other types. Numbers that are not integers are missing without integers,
    because no schema allows exactly these."""
    if not types:
        return True
    narrowed = "integer" in types and "number" not in types
    others = sorted(TYPES - types - {"number" if narrowed else "integer"})
    return {"type": others} | ({NARROWED: True} if narrowed else {})


def _closed_names(part: object, root: Mapping[str, object]) -> Sequence[str] | None:
    """Returns the names that properties of an object can have; None if they can have any."""
    part = resolved(part, root)
    if not isinstance(part, dict) or part.get("additionalProperties") is not False or "patternProperties" in part:
        return None
    return [*dict_at(part, "properties")]


def _has_discriminator(parts: Sequence[object], disjointness: Disjointness) -> bool:
    """Returns True if all parts are objects that require a property, and its strings in each part differ from those in
    all others."""
    if any(disjointness.common_types([part]) != {"object"} for part in parts):
        return False
    labels = [disjointness.labels(part) for part in parts]
    for name in set.intersection(*(set(each) for each in labels)):
        texts = [each[name] for each in labels]
        if len(frozenset[str]().union(*texts)) == sum(map(len, texts)):
            return True
    return False
