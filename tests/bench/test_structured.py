"""The benchmark of grammars: what it asks for can be asked for, and its figures are those of neighbours in time."""

import asyncio
import json
from pathlib import Path

import jsonschema

from bench.structured import Row, floors, with_schema
from bench.structured_cost import GRAMMAR, SCHEMA, answer, step_costs
from tests.engines.native.grammars import speaking_model, tiny_grammars, tiny_tokenizer


def test_the_answer_that_is_followed_is_one_that_the_schema_allows() -> None:
    jsonschema.validate(json.loads(answer()), SCHEMA)
    matcher = tiny_grammars().get(GRAMMAR).matcher(tiny_tokenizer().encode(answer()))
    assert matcher.inner.is_accepting()


def test_what_a_step_costs_is_told_for_each_n(tmp_path: Path) -> None:
    costs = step_costs(speaking_model(tmp_path), (1, 3), steps=40)
    assert [cost.n for cost in costs] == [1, 3]
    assert all(cost.total_ms >= cost.fill_ms > 0 and cost.apply_ms > 0 and cost.consume_ms > 0 for cost in costs)


def test_the_ratio_is_that_of_neighbours_and_a_floor_can_be_missed() -> None:
    row = Row(32, free=[100, 50, 200], bound=[95, 40, 190])
    assert row.ratio == 0.95
    assert floors([row])[0].met
    assert not floors([Row(32, free=[100], bound=[80])])[0].met
    assert not floors([Row(8, free=[100], bound=[100])])[0].met


def test_only_the_schema_is_added_to_a_request() -> None:
    body = asyncio.run(with_schema({"n": 2, "ignore_eos": True}))
    assert body == {"n": 2, "ignore_eos": False, "structured_outputs": {"json": SCHEMA}}
