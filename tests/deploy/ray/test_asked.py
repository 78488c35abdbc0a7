"""What can be known of a request before its body has come."""

import pickle  # noqa: TID251  as Serve's proxy hands a request to its router
from dataclasses import dataclass

import pytest

from motet.deploy.ray.asked import Asked, asked_of, choices_in, named_in


@pytest.mark.parametrize(
    ("text", "choices"),
    [("8", 8), ("1", 1), ("", 1), ("0", 1), ("-3", 1), ("many", 1), ("2.5", 1), ("٣", 1), ("9" * 30, 1)],
)
def test_a_header_that_is_no_number_of_choices_counts_as_one(text: str, choices: int) -> None:
    assert choices_in(text) == choices


@dataclass
class Brought:
    """What the proxy pickles, as far as it is looked at."""

    asgi_scope: dict[str, object]


def scope(*headers: tuple[bytes, bytes]) -> bytes:
    return pickle.dumps(Brought({"headers": list(headers)}))


def test_choices_and_session_are_read_from_headers_however_they_are_written() -> None:
    headers = scope((b"Host", b"x"), (b"X_Motet_Choices", b"8"), (b"X-SESSION_ID", b"s"))
    assert asked_of([headers], "") == Asked("s", 8)
    assert asked_of([scope((b"x-session-id", b"other"))], "of Serve") == Asked("of Serve", 1)


@pytest.mark.parametrize("args", [(), (b"no pickle",), (pickle.dumps({"headers": 1}),), (7, "x"), ("replica-1",)])
def test_a_request_that_cannot_be_read_has_one_choice(args: tuple[object, ...]) -> None:
    assert asked_of(args, "") == Asked()


def test_the_hook_names_a_replica() -> None:
    assert named_in(["replica-1"]) == "replica-1"
    assert named_in([""]) == ""
    assert named_in([]) is named_in([b"scope"]) is None
