"""All schemas of the suite."""

from tests.structured.schemas import (
    arrays,
    combined,
    formats,
    numbers,
    objects,
    pydantic_models,
    real_life,
    references,
    strings,
    unicode,
    values,
)

GROUPS = {
    "objects": objects.CASES,
    "arrays": arrays.CASES,
    "values": values.CASES,
    "formats": formats.CASES,
    "strings": strings.CASES,
    "numbers": numbers.CASES,
    "references": references.CASES,
    "combined": combined.CASES,
    "unicode": unicode.CASES,
    "real_life": real_life.CASES,
    "pydantic": pydantic_models.CASES,
}
CASES = tuple(case for cases in GROUPS.values() for case in cases)
