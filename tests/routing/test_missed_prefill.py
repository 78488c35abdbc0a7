"""Prefill that is not there now, but may be started where it is missed: what it would have got is counted."""

import pytest

from motet.routing.bypass import BypassRules
from tests.routing.cell import Cell, answer, answers_of, group

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("may_come", "missed"), [(False, {}), (True, {"prefill-down": 1, "short": 1})])
async def test_prefill_is_missed_where_it_may_come_and_would_have_paid(may_come: bool, missed: dict[str, int]) -> None:
    cell = Cell(rules=BypassRules(prefill_may_come=may_come))
    cell.fleet.remove("prefill-0")
    assert await answers_of(cell.engine, group("long")) == {0: answer(0), 1: answer(1)}
    assert await answers_of(cell.engine, group("short", prompt_tokens=20)) == {0: answer(0), 1: answer(1)}
    assert cell.bypasses == missed
    cell.check()
