"""The oracle of the suite: the reference implementation of JSON Schema."""

import json
import sys
from typing import NoReturn

from jsonschema import Draft202012Validator

from tests.structured.schemas.case import Schema


class SchemaOracle:
    """Validates texts against one schema, including formats."""

    def __init__(self, schema: Schema) -> None:
        Draft202012Validator.check_schema(schema)
        self._validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)

    def errors(self, text: str) -> str:
        """Returns the errors in a text; an empty string if it follows the schema."""
        try:
            value = json.loads(text, parse_constant=_reject_constant, parse_float=_finite)
        except ValueError as exc:
            return f"it is not JSON: {exc}"
        return "; ".join(error.message for error in self._validator.iter_errors(value))


def _reject_constant(name: str) -> NoReturn:
    """Rejects NaN and Infinity, which Python accepts although JSON does not have them."""
    raise ValueError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    """Parses a number, and limits it to the largest finite double, because the validator fails at infinity."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))
