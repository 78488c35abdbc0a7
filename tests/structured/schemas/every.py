"""All cases of the suite."""

from tests.structured.schemas import (
    arrays,
    combined,
    formats,
    numbers,
    objects,
    pydantic_models,
    real_life,
    references,
    replaced,
    strings,
    unicode,
    values,
)

GROUPS = (
    *(objects, arrays, values, formats, strings, numbers),
    *(references, combined, replaced, unicode, real_life, pydantic_models),
)
CASES = tuple(case for group in GROUPS for case in group.CASES)
