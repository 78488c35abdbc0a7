"""Limits the work for `multipleOf` in all schemas of one grammar."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal

from motet.grammar.limits import MAX_DECIMALS, MAX_MULTIPLES
from motet.grammar.schema.keywords import Path, SchemaPath, list_at, schema_error, target_of


class Multiples:
    """Adds up the work for `multipleOf` in all schemas of one grammar, and limits it to `MAX_MULTIPLES`. A number costs
    one state for each remainder; its decimal point is ignored. Numbers that can apply to the same value (through
    `allOf`, `anyOf`, `oneOf`, `$ref`) cost their least common multiple. Equal costs count once."""

    def __init__(self) -> None:
        self._uses: Counter[int] = Counter()
        """Number of values for each number of states."""
        self._total = 0
        """Sum of the different numbers of states."""

    def add(self, schemas: Sequence[SchemaPath], root: Mapping[str, object]) -> None:
        """Counts the schemas of one root. Raises `GrammarError` at the number that exceeds the limit."""
        given = [
            ((*path, "multipleOf"), schema, _in_last_places(path, schema["multipleOf"]))
            for path, schema in schemas
            if isinstance(schema, dict) and "multipleOf" in schema
        ]
        group_of = _same_value(schemas, root) if given else {}
        common: dict[int, int] = {}
        for path, schema, number in given:
            group = group_of[id(schema)]
            if (before := common.get(group)) is not None:
                self._count(before, -1)
                number = math.lcm(before, number)
            common[group] = number
            self._count(number, 1)
            if self._total > MAX_MULTIPLES:
                raise schema_error(
                    path,
                    f"the sum of this 'multipleOf' and the preceding ones is {self._total}; at most {MAX_MULTIPLES} is "
                    "allowed (for numbers that apply to the same value, their least common multiple counts)",
                )

    def _count(self, number: int, change: int) -> None:
        states = _without_point(number)
        was_used = self._uses[states] > 0
        self._uses[states] += change
        self._total += states * ((self._uses[states] > 0) - was_used)


def _in_last_places(path: Path, value: object) -> int:
    """Returns a number as a multiple of 10 to the power of -MAX_DECIMALS. Raises `GrammarError` if the number exceeds
    the limit by itself."""
    scaled = Decimal(repr(value)).scaleb(MAX_DECIMALS)
    if scaled != int(scaled) or _without_point(int(scaled)) > MAX_MULTIPLES:
        raise schema_error(
            (*path, "multipleOf"),
            f"{value} is too much work: without its decimal point it must be at most {MAX_MULTIPLES}, and it can have "
            f"at most {MAX_DECIMALS} decimal places",
        )
    return int(scaled)


def _without_point(number: int) -> int:
    """Removes up to `MAX_DECIMALS` zeros from the end of a number: the unused decimal places."""
    for _ in range(MAX_DECIMALS):
        if number % 10:
            break
        number //= 10
    return number


def _same_value(schemas: Sequence[SchemaPath], root: Mapping[str, object]) -> dict[int, int]:
    """Maps the id of each schema to the id of one of the schemas that can apply to the same value (union-find)."""
    parent = {id(schema): id(schema) for _, schema in schemas}

    def representative(schema: int) -> int:
        while parent[schema] != schema:
            parent[schema] = schema = parent[parent[schema]]
        return schema

    for _, schema in schemas:
        if not isinstance(schema, dict):
            continue
        parts = [target_of(str(schema["$ref"]), root)] if "$ref" in schema else []
        for key in ("allOf", "anyOf", "oneOf"):
            parts += list_at(schema, key)
        for part in parts:
            if isinstance(part, dict):
                parent[representative(id(part))] = representative(id(schema))
    return {schema: representative(schema) for schema in parent}
