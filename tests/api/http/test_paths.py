"""Paths with slashes at their end, and without /v1, reach the routes of the usual paths, with the same keys."""

import itertools

import pytest
from openai import AsyncOpenAI

from motet.api.http.gate import ADMIN_ROUTES, OPEN_ROUTES
from motet.api.http.paths import WITHOUT_V1, usual_path
from tests.api.serving import Served, Serving
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio

BODIES: dict[str, dict[str, object]] = {
    "/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/completions": {"prompt": "hi"},
    "/responses": {"input": "hi"},
}


@pytest.mark.parametrize(
    ("path", "usual"),
    [
        ("/", "/"),
        ("//", "/"),
        ("/health/", "/health"),
        ("/v1/models///", "/v1/models"),
        ("/models", "/v1/models"),
        ("/models/a/b/", "/v1/models/a/b"),
        ("/modelsmore", "/modelsmore"),
        ("/responses/input_tokens", "/v1/responses/input_tokens"),
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/messages", "/messages"),
        ("/drain\n", "/drain\n/"),
    ],
)
def test_a_path_has_one_usual_form(path: str, usual: str) -> None:
    assert usual_path(path) == usual
    assert usual_path(usual) == usual


@pytest.mark.parametrize(("path", "prefix", "end"), [*itertools.product(BODIES, ["", "/v1"], ["", "/"])])
async def test_every_form_is_answered_without_a_redirect(served: Served, path: str, prefix: str, end: str) -> None:
    answer = await served.http.post(prefix + path + end, json=BODIES[path], follow_redirects=False)
    assert answer.status_code == 200
    counted = f'handler="/v1{path}",method="POST",status="200"'
    assert counted in await served.metrics()


async def test_the_lists_of_models_are_the_same(served: Served) -> None:
    """Regression: `/v1/models/` said that the model with an empty name does not exist."""
    expected = (await served.http.get("/v1/models")).json()
    for path in ("/v1/models/", "/models", "/models/"):
        assert (await served.http.get(path)).json() == expected
    assert (await served.http.get("/models/tiny/")).json() == expected["data"][0]
    assert (await served.http.get("/")).content == (await served.http.get("//")).content


async def test_a_client_whose_base_url_lacks_v1_works(served: Served) -> None:
    async with AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
        assert answer.choices[0].message.content == "hello 0"
        assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_an_error_of_messages_keeps_its_dialect(served: Served) -> None:
    assert (await served.http.post("/v1/messages/", json={})).json()["type"] == "error"


@pytest.mark.slow
async def test_other_forms_need_the_same_keys(serve: Serving) -> None:
    served = await serve(api_keys=("secret",), admin_key="admin", worker_key="worker")
    for path in (*WITHOUT_V1, "/v1/models", *ADMIN_ROUTES, "/workers"):
        for end in ("", "/", "//"):
            assert (await served.http.get(path + end)).status_code == 401
    key = {"authorization": "Bearer secret"}
    for path in (*ADMIN_ROUTES, "/engine"):
        assert (await served.http.get(f"{path}/", headers=key)).status_code in (401, 403)
    for path in OPEN_ROUTES:
        assert (await served.http.get(f"{path}/")).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("root", ["", "/llm"])
@pytest.mark.parametrize("end", ["%0A", "%0A/", "/%0A", "%0A%0A", "%0D%0A", "%0D", "%00"])
async def test_no_character_at_the_end_of_a_path_avoids_its_key(serve: Serving, root: str, end: str) -> None:
    """Regression: an API key opened `/drain%0A`, which ended the server, and `/engine%0A`."""
    served = await serve(api_keys=("secret",), admin_key="admin", worker_key="worker", root_path=root)
    key = {"authorization": "Bearer secret"}
    for path in (*ADMIN_ROUTES, "/engine", "/engine/tokenizer", "/workers", "/workers/a", "/workers/a/kill"):
        for method in ("GET", "POST", "DELETE"):
            answer = await served.http.request(method, f"{root}{path}{end}", headers=key)
            assert answer.status_code in (401, 403, 404), (method, path)
    assert (await served.http.get(f"{root}/v1/models{end}", headers=key)).status_code == 404


async def test_other_forms_work_below_a_root_path(serve: Serving) -> None:
    served = await serve(root_path="/llm")
    for path in ("/llm/v1/models", "/llm/v1/models/", "/llm/models/", "/v1/models/", "/llm/"):
        assert (await served.http.get(path)).status_code == 200


async def test_a_401_names_the_scheme_of_its_key(serve: Serving) -> None:
    """RFC 9110, 15.5.2."""
    served = await serve(api_keys=("secret",), admin_key="admin", worker_key="worker")
    for path in ("/v1/models", "/v1/messages", "/drain", "/engine"):
        for headers in ({}, {"authorization": "Bearer wrong"}):
            refused = await served.http.get(path, headers=headers)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, 'Bearer realm="Motet"')


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/models/", "GET, HEAD"),
        ("POST", "/v1/groups/any", "DELETE, GET, HEAD"),
        ("DELETE", "/ping", "GET, HEAD, POST"),
    ],
)
async def test_a_405_lists_the_methods_of_its_path(refusing: Served, method: str, path: str, allowed: str) -> None:
    """RFC 9110, 15.5.6."""
    refused = await refusing.http.request(method, path)
    assert (refused.status_code, refused.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/generate", "/v1/messages"])
async def test_a_compressed_body_is_refused_by_its_encoding(refusing: Served, path: str) -> None:
    """Regression: it was said to be invalid JSON."""
    for encoding in ("gzip", "br", "GZIP, identity", "x" * 1000):
        refused = await refusing.http.post(path, content=b"\x1f\x8b", headers={"content-encoding": encoding})
        assert (refused.status_code, refused.headers["accept-encoding"]) == (415, "identity")
        assert len(refused.text) < 400
        if path != "/v1/messages":
            assert_error(refused, status=415, code="unsupported_content_encoding")


async def test_identity_is_no_compression(served: Served) -> None:
    body = BODIES["/chat/completions"]
    answer = await served.http.post("/v1/chat/completions", json=body, headers={"content-encoding": "Identity"})
    assert answer.status_code == 200
