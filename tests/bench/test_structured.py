"""The benchmark of grammars: its answer follows the schema, and its ratio compares consecutive requests."""

import asyncio
import json
from pathlib import Path

import jsonschema
import pytest

from bench.structured.__main__ import SchemaRow, targets, with_schema
from bench.structured.step_cost import GRAMMAR, SCHEMA, answer, step_costs
from tests.engines.native.grammars import speaking_model, tiny_grammars, tiny_tokenizer


def test_the_answer_of_the_benchmark_follows_the_schema() -> None:
    jsonschema.validate(json.loads(answer()), SCHEMA)
    matcher = tiny_grammars().get(GRAMMAR).matcher(tiny_tokenizer().encode(answer()))
    assert matcher.inner.is_accepting()


@pytest.mark.slow
def test_the_costs_of_a_step_are_measured_for_each_n(tmp_path: Path) -> None:
    costs = step_costs(speaking_model(tmp_path), (1, 3), steps=40)
    assert [cost.n for cost in costs] == [1, 3]
    assert all(cost.total_ms >= cost.fill_ms > 0 and cost.apply_ms > 0 and cost.consume_ms > 0 for cost in costs)


def test_the_ratio_compares_consecutive_requests_and_its_target_can_be_missed() -> None:
    row = SchemaRow(32, free=[100, 50, 200], bound=[95, 40, 190])
    assert row.ratio == 0.95
    assert targets([row])[0].met
    assert not targets([SchemaRow(32, free=[100], bound=[80])])[0].met
    assert not targets([SchemaRow(8, free=[100], bound=[100])])[0].met


def test_only_the_schema_is_added_to_a_request() -> None:
    body = asyncio.run(with_schema({"n": 2, "ignore_eos": True}))
    assert body == {"n": 2, "ignore_eos": False, "structured_outputs": {"json": SCHEMA}}
