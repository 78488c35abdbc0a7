"""The names of workers on a command line, in the environment and in a file."""

import pytest

from motet.engine_info import EngineKind
from motet.errors import ConfigError
from motet.settings.named_worker import NamedWorker, by_url, named_workers, roles_by_url
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
        ([f"{A},openai"], [NamedWorker(A, kind=EngineKind.OPENAI)]),
        (
            [f"{A},vllm,prefill,{B},decode,vllm"],
            [NamedWorker(A, Role.PREFILL, EngineKind.VLLM), NamedWorker(B, Role.DECODE, EngineKind.VLLM)],
        ),
    ],
    ids=str,
)
def test_a_worker_is_a_url_with_an_optional_role_and_kind(texts: list[str], named: list[NamedWorker]) -> None:
    assert list(named_workers(texts)) == named


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prefill", "prefill has no URL before it"),
        (f"{A},prefill,decode", "decode has no URL before it"),
        (f"{A},cook", "'cook' is neither a URL such as http://host:8000 nor a role (prefill, decode, both)"),
        (f"{A},vllm,motet", "motet has no URL before it"),
        ("a:8000", "'a:8000' is neither a URL"),
        (f"{A},", "'' is neither a URL"),
        (f"{A} {B}", "is neither a URL"),
    ],
)
def test_anything_else_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        list(named_workers([text]))
    assert says in caught.value.message


def test_roles_can_be_given_without_urls() -> None:
    assert roles_by_url([f"{A}/v1=prefill", f"{B}=decode"]) == {A: Role.PREFILL, B: Role.DECODE}


def test_the_value_of_a_url_follows_the_last_equals_sign() -> None:
    assert by_url([f"{A}/?a=b=key"]) == {f"{A}/?a=b": "key"}


@pytest.mark.parametrize("text", [A, f"{A}=", "prefill", "a:8000=prefill"])
def test_a_word_without_a_url_or_a_url_without_a_word_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not URL=WORD"):
        by_url([text])


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ConfigError, match="http://a:8000=cook: a role is one of prefill, decode, both"):
        roles_by_url([f"{A}=cook"])
