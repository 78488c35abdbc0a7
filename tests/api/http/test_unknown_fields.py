"""Fields that the server does not know: refused, or ignored and named in a header and in the log."""

import logging
from typing import Any
from urllib.parse import unquote

import pytest

from motet.api.http.unknown_fields import IGNORED_HEADER, MAX_HEADER_CHARS, MAX_LOGGED, MAX_NAMES
from tests.api.noted_control import NotedControl
from tests.api.serving import PROMPT, Served, Serving, chunks
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio

TURN = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [TURN]},
    "/v1/completions": {"prompt": PROMPT},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": [TURN], "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": [TURN]},
    "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {}},
    "/generate": {"input_ids": PROMPT},
    "/v1/chat/completions/render": {"messages": [TURN]},
    "/v1/completions/render": {"prompt": PROMPT},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": PROMPT},
}
every_route = pytest.mark.parametrize("path", list(BODIES))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the ignored fields of each line in the log."""
    lines = [record for record in caplog.records if record.message == "unknown fields are ignored"]
    return [vars(record)["fields"]["ignored"] for record in lines]


@every_route
async def test_an_unknown_field_is_refused(refusing: Served, path: str) -> None:
    refused = await refusing.http.post(path, json=BODIES[path] | {"unheard_of": 1})
    assert refused.status_code == 400
    assert "'unheard_of'" in refused.json()["error"]["message"]
    assert IGNORED_HEADER not in refused.headers


@every_route
async def test_or_ignored_and_named(serve: Serving, caplog: pytest.LogCaptureFixture, path: str) -> None:
    caplog.set_level(logging.WARNING, "motet.api")
    served = await serve(unknown_fields="warn")
    plain = await served.http.post(path, json=BODIES[path])
    given = BODIES[path] | {"unheard_of": {"a": [1]}, "nothing": None, "other": 1}
    answer = await served.http.post(path, json=given)
    assert (plain.status_code, answer.status_code) == (200, 200), answer.text
    assert answer.headers[IGNORED_HEADER] == "unheard_of, other"
    assert IGNORED_HEADER not in plain.headers
    assert (await served.http.post(path, json=given | {"third": 1})).headers[IGNORED_HEADER].endswith("third")
    assert warnings(caplog) == ["unheard_of, other", "third"]
    if requests := served.engine.requests:
        assert requests[1].sampling == requests[0].sampling
        assert requests[1].prompt == requests[0].prompt


async def test_a_stream_and_an_error_name_ignored_fields_too(serve: Serving) -> None:
    served = await serve(unknown_fields="warn")
    answer = await served.chat(stream=True, unheard_of=1)
    assert chunks(answer)
    refused = await served.chat(n=0, unheard_of=1)
    assert_error(refused, status=400, param="n")
    assert answer.headers[IGNORED_HEADER] == refused.headers[IGNORED_HEADER] == "unheard_of"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"stop": 5}, "stop"),
        ({"group": {"unheard_of": 1}}, "group.unheard_of"),
        ({"stream": True, "stream_options": {"unheard_of": 1}}, "stream_options.unheard_of"),
    ],
)
async def test_known_fields_and_inner_fields_are_still_refused(
    serve: Serving, fields: dict[str, Any], param: str
) -> None:
    served = await serve(unknown_fields="warn")
    assert_error(await served.complete(PROMPT, **fields), status=400, param=param)


async def test_fields_of_trainers_routes_are_ignored_too(serve: Serving, control: NotedControl) -> None:
    for policy, status in (("refuse", 400), ("warn", 200)):
        served = await serve(rl=True, unknown_fields=policy)
        served.service.control = control
        answer = await served.http.post("/pause_generation", json={"mode": "retract", "unheard_of": 1})
        assert answer.status_code == status
        assert answer.headers.get(IGNORED_HEADER) == ("unheard_of" if status == 200 else None)


@pytest.mark.slow
async def test_a_hostile_client_cannot_make_header_and_log_long(
    serve: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "motet.api")
    served = await serve(unknown_fields="warn")
    many = {f"x{number}": 1 for number in range(1000)}
    header = (await served.complete(PROMPT, **many)).headers[IGNORED_HEADER]
    assert header == ", ".join([*[f"x{number}" for number in range(MAX_NAMES)], "..."])
    long = {f"{number}é\r\n, {'日' * 100_000}": 1 for number in range(MAX_NAMES)}
    header = (await served.complete(PROMPT, **long)).headers[IGNORED_HEADER]
    assert len(header) <= MAX_HEADER_CHARS + len(", ...")
    assert header.endswith(", ...")
    assert unquote(header).startswith("0é\r\n, 日日")
    for start in range(0, 400, 10):
        await served.complete(PROMPT, **{f"y{number}": 1 for number in range(start, start + 10)})
    assert len(", ".join(warnings(caplog))) < 20_000
    named = [name for line in warnings(caplog) for name in line.split(", ") if name.startswith(("x", "y"))]
    assert len(named) <= MAX_LOGGED
    assert [record.message for record in caplog.records][-1].startswith("more unknown fields of this client")


async def test_each_client_has_its_own_lines(serve: Serving, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "motet.api")
    served = await serve(unknown_fields="warn", api_keys=("a", "b"))
    for key in ("a", "b", "a"):
        headers = {"authorization": f"Bearer {key}"}
        body = BODIES["/v1/completions"] | {"unheard_of": 1}
        answer = await served.http.post("/v1/completions", json=body, headers=headers)
        assert answer.headers[IGNORED_HEADER] == "unheard_of"
    assert warnings(caplog) == ["unheard_of", "unheard_of"]
