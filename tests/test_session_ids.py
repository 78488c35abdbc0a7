"""The id of a conversation in the headers of a request."""

import re

import pytest

from motet.session_ids import HEADER_PATTERN, SessionHeaders, headers_on_ray


def session_of(*headers: tuple[str, str], names: tuple[str, ...] = ()) -> str:
    return SessionHeaders(names).session_of([(name.encode(), value.encode("latin-1")) for name, value in headers])


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ([], ""),
        ([("X-Session_ID", "a")], "a"),
        ([("x-session-id", ""), ("session_id", "codex")], "codex"),
        ([("x-session-id", "two words"), ("x-session-id", "b")], "b"),
        ([("x-session-id", "first"), ("x-session-id", "second")], "first"),
        ([("session-id", "codex"), ("x-dynamo-session-id", "dynamo")], "dynamo"),
        ([("x-dynamo-session-id", "s" * 201)], ""),
        ([("x-dynamo-session-id", "\xe9")], ""),
        ([("x-dynamo-parent-session-id", "parent")], ""),
    ],
)
def test_the_valid_id_with_the_highest_precedence_is_read(headers: list[tuple[str, str]], session: str) -> None:
    assert session_of(*headers) == session


def test_the_operator_s_headers_follow_the_usual_one_and_precede_those_of_known_clients() -> None:
    headers = (("x-dynamo-session-id", "dynamo"), ("X-Talk", "talk"), ("x-session-id", "usual"))
    assert session_of(*headers, names=("x_talk",)) == "usual"
    assert session_of(*headers[:2], names=("x_talk",)) == "talk"
    assert session_of(*headers[:2], names=("session-id", "x-dynamo-session-id")) == "dynamo"


def test_headers_with_keys_cannot_be_session_headers() -> None:
    for name in ("Authorization", "x-api-key", "cookie", "two words", "", "a:b", "x\n"):
        assert re.fullmatch(HEADER_PATTERN, name) is None
    for name in ("x-correlation-id", "X_Session", "authorization-id"):
        assert re.fullmatch(HEADER_PATTERN, name) is not None


def test_ray_s_header_is_added_if_the_node_s_environment_names_one() -> None:
    assert headers_on_ray(["a"], {}) == headers_on_ray(["a"], {"RAY_SERVE_SESSION_ID_HEADER_KEY": " "}) == ("a",)
    assert headers_on_ray(["a"], {"RAY_SERVE_SESSION_ID_HEADER_KEY": "x-corr"}) == ("a", "x-corr")
