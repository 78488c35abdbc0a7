"""Only modules and tests that the command line excludes are left out."""

import pytest

from tests.excluded import excluded_by, marks_of_module


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("not slow", {"slow"}),
        ("not slow and not gpu", {"slow", "gpu"}),
        ("", set()),
        ("slow", set()),
        ("ray and not long", set()),
        ("not slow or not gpu", set()),
        ("not (slow and gpu)", set()),
    ],
)
def test_marks_are_excluded_if_each_of_them_suffices(expression: str, expected: set[str]) -> None:
    assert excluded_by(expression) == expected


def test_a_module_has_the_marks_of_its_line_and_not_those_of_its_tests() -> None:
    text = "import pytest\npytestmark = [pytest.mark.anyio, pytest.mark.slow]\n@pytest.mark.gpu\ndef test_a(): ..."
    assert marks_of_module(text) == {"anyio", "slow"}
    assert marks_of_module("@pytest.mark.slow\ndef test_a(): ...") == set()
