"""The oracle of the suite: the reference implementation of JSON Schema."""

import json
import sys
from typing import NoReturn

from jsonschema import Draft202012Validator

from tests.structured.schemas.case import Schema


class Judge:
    """Judges texts by one schema; formats are checked too."""

    def __init__(self, schema: Schema) -> None:
        Draft202012Validator.check_schema(schema)
        self._validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)

    def faults(self, text: str) -> str:
        """Returns what is wrong with a text; empty if it follows the schema."""
        try:
            value = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        except ValueError as exc:
            return f"it is not JSON: {exc}"
        return "; ".join(error.message for error in self._validator.iter_errors(value))


def _no_number(name: str) -> NoReturn:
    """Refuses NaN and Infinity, which Python reads but JSON does not have."""
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    """Reads a number as a finite double: the validator fails at infinity, and the largest double does as well."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))
