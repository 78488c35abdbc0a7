"""The sampling fields of requests are the fields that `SamplingParams` declares."""

from typing import get_type_hints

import pytest

from motet.api.generation.request_fields import SamplingFields
from motet.types import SAMPLING_FIELDS, VERBATIM_FIELDS, SamplingParams

OTHERS = {"logprobs", "prompt_logprobs"}
"""Fields that are not the same on all routes, so each body has its own."""


def test_the_schema_names_every_declared_field() -> None:
    missing = SAMPLING_FIELDS.keys() - SamplingFields.model_fields.keys() - OTHERS
    assert not missing, f"add {sorted(missing)} to SamplingFields in api/generation/request_fields.py"


@pytest.mark.parametrize("name", VERBATIM_FIELDS)
def test_a_verbatim_field_has_the_declared_type_default_and_range(name: str) -> None:
    declared, field = SAMPLING_FIELDS[name], SamplingFields.model_fields[name]
    assert field.annotation is get_type_hints(SamplingParams)[name]
    assert field.default == getattr(SamplingParams(max_tokens=1), name)
    described = SamplingFields.model_json_schema()["properties"][name]
    described = described["anyOf"][0]  # the other one is null
    assert described.get("exclusiveMinimum" if declared.above_low else "minimum") == declared.low
    assert described.get("maximum") == declared.high
