"""How workers are named on a command line, in the environment and in a file."""

import pytest

from motet.errors import ConfigError
from motet.settings.named_worker import NamedWorker, named_workers
from motet.types import Role

A, B = "http://a:8000", "https://b/motet"


@pytest.mark.parametrize(
    ("texts", "named"),
    [
        ([], []),
        ([A], [NamedWorker(A)]),
        ([f"{A},prefill"], [NamedWorker(A, Role.PREFILL)]),
        ([f"{A},decode", B], [NamedWorker(A, Role.DECODE), NamedWorker(B)]),
        ([f"{A} , both , {B},prefill"], [NamedWorker(A, Role.BOTH), NamedWorker(B, Role.PREFILL)]),
        ([f"{A}/", f"{B}/v1/"], [NamedWorker(A), NamedWorker(B)]),
    ],
    ids=str,
)
def test_a_worker_is_a_url_and_perhaps_a_role(texts: list[str], named: list[NamedWorker]) -> None:
    assert list(named_workers(texts)) == named


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prefill", "prefill has no URL before it"),
        (f"{A},prefill,decode", "decode has no URL before it"),
        (f"{A},cook", "'cook' is neither a URL such as http://host:8000 nor a role (prefill, decode, both)"),
        ("a:8000", "'a:8000' is neither a URL"),
        (f"{A},", "'' is neither a URL"),
        (f"{A} {B}", "is neither a URL"),
    ],
)
def test_anything_else_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        list(named_workers([text]))
    assert says in caught.value.message
