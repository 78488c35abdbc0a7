"""The tables about `group` in docs/steering.md list the fields and conditions of the schema, with their bounds."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from motet.api.generation.group_schema import MAX_CONDITIONS, GroupFields, StopWhen
from tests.api.serving import Served
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio

PAGE = (Path(__file__).parents[3] / "docs" / "steering.md").read_text()
N = 8
FINISHED = {"finished": 1}

ALLOWED: dict[str, tuple[list[Any], list[Any]]] = {
    "k from 1 to n": ([1, N], [0, -1, N + 1, 1.5, "1", None]),
    "w from 2 to n": ([2, N], [0, 1, N + 1, 2.5, "2", None]),
    "p between 0.5 and 1, both exclusive": ([0.501, 0.999], [0.5, 1, 0, -1, "0.9", None]),
    f"1 to {MAX_CONDITIONS} conditions, none of them `any_of`": (
        [[FINISHED], [FINISHED] * MAX_CONDITIONS],
        [[], [FINISHED] * (MAX_CONDITIONS + 1), [{"any_of": [FINISHED]}], [{}], FINISHED, None],
    ),
}
"""Allowed values of a condition in words, with values that are accepted and values that are refused."""


def rows(heading: str) -> list[list[str]]:
    """Returns the cells of the table below a heading, without its head."""
    table = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines[1:]]


CONDITIONS = {cells[0].strip("`{}").partition(":")[0].strip('"'): cells[1] for cells in rows("Conditions")}


def test_the_table_of_fields_has_every_field_of_a_group() -> None:
    assert [cells[0].strip("`") for cells in rows("The fields of `group`")] == [*GroupFields.model_fields]


def test_the_table_of_conditions_has_every_condition() -> None:
    assert [*CONDITIONS] == [name for name in StopWhen.model_fields if name != "extract"]


@pytest.mark.parametrize("name", CONDITIONS)
async def test_a_condition_has_the_bounds_that_its_row_says(served: Served, name: str) -> None:
    accepted, refused = ALLOWED[CONDITIONS[name]]
    for value in accepted:
        assert (await sent(served, {name: value})).status_code == 200, value
    for value in refused:
        assert_error(await sent(served, {name: value}), status=400)


async def test_exactly_one_condition_is_given(served: Served) -> None:
    wrong: list[dict[str, object]] = [{}, {"finished": 1, "agree": 2}, {"extract": "last_line"}]
    for condition in wrong:
        answer = await sent(served, condition)
        assert_error(answer, status=400)
        assert all(name in answer.json()["error"]["message"] for name in CONDITIONS)


async def sent(served: Served, condition: dict[str, object]) -> httpx.Response:
    group = {"stop_when": condition, "extract": "last_line"}
    body = {"prompt": "x", "n": N, "max_tokens": 1, "group": group}
    return await served.http.post("/v1/completions", json=body)
