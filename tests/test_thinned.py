"""`make check` runs each value of each parameter, and no more cases of a test than the limit."""

from tests.thinned import chosen_places, each_value_once

PRODUCT = [(name, work) for name in "abcdef" for work in "xy"]


def test_each_value_occurs_and_values_alternate() -> None:
    chosen = [PRODUCT[place] for place in each_value_once(PRODUCT)]
    assert sorted(name for name, _ in chosen) == list("abcdef"), "each value of the longest axis is there once"
    assert [work for _, work in chosen].count("x") == 3


def test_a_table_keeps_all_cases_up_to_the_limit_and_then_an_equal_part() -> None:
    table = [(number,) for number in range(20)]
    assert chosen_places(table[:8], "a", 8) == list(range(8))
    assert len(chosen_places(table, "a", 8)) in (6, 7)
    parts = {tuple(chosen_places(table, name, 8)) for name in "abcdefgh"}
    assert len(parts) == 3, "tests of different names have different parts"
