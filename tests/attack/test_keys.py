"""Keys: how the key of a client is checked, and which servers it is sent to."""

import secrets
from typing import Any

import pytest
from starlette.datastructures import Headers

from motet.api.http.gate import KeyCheck
from motet.errors import UnauthorizedError
from tests.api.serving import Serving
from tests.attack.test_neighbours import KEYS, ONE, OTHER, salts
from tests.deploy.gateways import BODY, RunningGateway
from tests.peers.fake_openai import FakeOpenAI
from tests.peers.openai_script import Behaviour

pytestmark = [pytest.mark.anyio, pytest.mark.every_case]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("key", ["first", "second", "third", "f", "é" * 9])
def test_a_key_is_compared_with_all_in_constant_time(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    compare = secrets.compare_digest

    def counted(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return compare(one, other)

    monkeypatch.setattr(secrets, "compare_digest", counted)
    keys = (b"first", b"second")
    check = KeyCheck(client="key", keys=keys, missing="", wrong="")
    scope: dict[str, Any] = {"state": {}}
    headers = Headers(raw=[(b"authorization", b"Bearer " + key.encode())])
    if key.encode() in keys:
        check.check(scope, headers)
        assert scope["state"]["client"] == f"key-{keys.index(key.encode())}"
    else:
        with pytest.raises(UnauthorizedError):
            check.check(scope, headers)
    assert compared == [*keys]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "forwarded"),
    [({"admin_key": ""}, "mine"), ({"admin_key": "", "api_keys": ("mine",)}, None), ({"admin_key": "boss"}, None)],
)
async def test_a_client_s_key_is_forwarded_only_by_a_gateway_without_keys(
    settings: dict[str, Any], forwarded: str | None
) -> None:
    async with (
        FakeOpenAI(Behaviour(models=({"id": "m", "max_model_len": 99},))) as upstream,
        RunningGateway(upstream.url, **settings) as gateway,
    ):
        answer = await gateway.http.post("/v1/chat/completions", json={**BODY, "n": 1}, headers=bearer("mine"))
        assert answer.status_code == 200
        sent = [
            request.headers.get("authorization")
            for request in upstream.requests
            if request.body.get("seed") == BODY["seed"]
        ]
        assert sent == [None if forwarded is None else f"Bearer {forwarded}"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi"}),
        ("/v1/score", {"prompt": "hi", "continuations": ["a"]}),
        ("/v1/decisions", {"input": "hi", "questions": [{"type": "predicate", "instructions": "Is it?"}]}),
    ],
)
async def test_other_routes_need_a_key_and_share_no_cached_prompts_between_keys(
    serve: Serving, path: str, body: dict[str, object]
) -> None:
    served = await serve(api_keys=KEYS, admin_key="boss")
    for headers in ({}, bearer("x"), bearer("boss")):
        assert (await served.http.post(path, json=body, headers=headers)).status_code == 401
    for key in (ONE, OTHER, ONE):
        answer = await served.http.post(path, json=body, headers=bearer(key))
        assert answer.status_code == 200
    first, second, third = salts(served)
    assert first == third != second


async def test_a_key_can_come_in_the_header_of_anthropic_s_clients(serve: Serving) -> None:
    served, body = await serve(api_keys=KEYS, admin_key="boss"), {"messages": [{"role": "user", "content": "hi"}]}
    for path in ("/v1/messages", "/v1/chat/completions"):
        for headers in (bearer(ONE), {"x-api-key": ONE}, {"x-api-key": ONE, "authorization": "Basic eDp5"}):
            answer = await served.http.post(path, json=body | {"max_tokens": 5}, headers=headers)
            assert answer.status_code == 200, answer.text
    assert len({*salts(served)}) == 1
    for headers in ({"x-api-key": "x"}, {"x-api-key": ""}, bearer("x") | {"x-api-key": ONE}, {"x-api-key": "boss"}):
        assert (await served.http.get("/v1/models", headers=headers)).status_code == 401
    assert (await served.http.get("/workers", headers={"x-api-key": ONE})).status_code == 401


async def test_the_choices_of_a_group_have_one_salt(serve: Serving) -> None:
    served = await serve(api_keys=KEYS)
    body = {"prompt": ["x", "x"], "n": 3}
    assert (await served.http.post("/v1/completions", json=body, headers=bearer(ONE))).status_code == 200
    assert len(salts(served)) == 2 and len({*salts(served)}) == 1
