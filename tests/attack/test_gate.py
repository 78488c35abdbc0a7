"""Access: callers without the right key, on other machines, behind proxies, and in web pages."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from motet.api.worker.engine_routes import MAX_CONNECTING
from motet.deploy.discover import ProbeSettings
from motet.deploy.listen import HttpServer, listen, port_of, url_of
from motet.engine_orders import Connect
from motet.engines.http import server_client
from motet.errors import EngineDiedError, EngineError, MotetError
from motet.settings.gateway_config import GatewayConfig
from motet.settings.named_worker import NamedWorker
from motet.settings.server_config import ServerConfig
from motet.transfer.ticket import TransferAddress
from motet.types import Role
from tests.api.engine_requests import HEADERS, POSTS, group
from tests.api.serving import MODEL, Served, Serving
from tests.deploy.listening import serving
from tests.deploy.running import Running
from tests.error_response import assert_error
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.anyio, pytest.mark.every_case]

ENGINE_ROUTES = [("GET", "/engine"), ("GET", "/engine/tokenizer"), *(("POST", path) for path in POSTS)]
OPERATORS_ROUTES = [
    *(("POST", path) for path in ("/drain", "/workers", "/workers/a/kill")),
    *(("GET", "/workers"), ("DELETE", "/workers/a")),
]
TRAINERS_ROUTES = [
    *(("POST", path) for path in ("/pause", "/resume", "/update_weights", "/sleep", "/wake_up", "/reset_prefix_cache")),
    *(("GET", path) for path in ("/is_paused", "/is_sleeping", "/server_info", "/get_world_size")),
]
INDIRECT: list[dict[str, str]] = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"x-forwarded-for": "127.0.0.1"},
    {"forwarded": "for=127.0.0.1"},
    {"x-real-ip": "127.0.0.1"},
    {"via": "1.1 proxy"},
    {"sec-fetch-site": "same-site"},
]
CHAT = b'{"messages": [{"role": "user", "content": "hi"}]}'


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def from_host(served: Served, address: str) -> httpx.AsyncClient:
    """Returns a client with this address."""
    transport = httpx.ASGITransport(app=served.app, client=(address, 1))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


@pytest.mark.parametrize(("method", "path"), ENGINE_ROUTES)
async def test_the_routes_of_workers_require_the_worker_key(serve: Serving, method: str, path: str) -> None:
    served = await serve(api_keys=("client",), admin_key="boss", worker_key="worker")
    for headers in ({}, bearer("client"), bearer("boss")):
        refused = await served.http.request(method, path, headers=headers)
        assert_error(refused, status=401, code="worker_key_required")
        assert "--worker-key" in refused.text
    passed = await served.http.request(method, path, headers=bearer("worker"))
    assert passed.status_code not in (401, 403)


@pytest.mark.parametrize("mounted", ["/llm", "/llm/", "/engine", ""])
@pytest.mark.parametrize("path", ["/engine", "/workers", "//engine", "/%65ngine", "/llm/engine", "/engine/../workers"])
async def test_no_spelling_of_a_path_gives_access_with_another_key(serve: Serving, mounted: str, path: str) -> None:
    served = await serve(api_keys=("client",), admin_key="boss", worker_key="worker", page=False)
    transport = httpx.ASGITransport(app=served.app, root_path=mounted)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        answer = await http.get(f"{mounted.rstrip('/')}{path}", headers=bearer("client"))
    assert answer.status_code in (401, 404)


async def test_the_worker_key_gives_access_to_no_other_route(serve: Serving) -> None:
    served = await serve(api_keys=("client",), worker_key="worker")
    for path in ("/v1/models", "/status", "/workers"):
        assert (await served.http.get(path, headers=bearer("worker"))).status_code == 401
    for path in ("/v1/completions", "/v1/score", "/v1/decisions"):
        assert (await served.http.post(path, json={}, headers=bearer("worker"))).status_code == 401


async def test_the_admin_key_gives_access_only_to_operators_routes(serve: Serving) -> None:
    served = await serve(api_keys=("client",), admin_key="boss")
    for path in ("/v1/models", "/status", "/metrics"):
        assert (await served.http.get(path, headers=bearer("boss"))).status_code == 401
        assert (await served.http.get(path, headers=bearer("client"))).status_code == 200
    assert (await served.http.get("/workers", headers=bearer("client"))).status_code == 401


async def test_the_cluster_key_gives_access_to_no_route(folder: Path) -> None:
    async with Running(
        folder, role=Role.DECODE, cluster_key="of the cluster", api_keys=["a"], admin_key="b", worker_key="c"
    ) as server:
        for method, path in (*ENGINE_ROUTES, *OPERATORS_ROUTES, ("GET", "/v1/models"), ("POST", "/v1/completions")):
            refused = await server.http.request(method, path, headers=bearer("of the cluster"))
            assert refused.status_code == 401


@pytest.mark.parametrize(
    ("method", "path"), [*TRAINERS_ROUTES, *(route for route in OPERATORS_ROUTES if route != ("GET", "/workers"))]
)
async def test_no_key_of_a_client_gives_access_to_the_routes_of_trainers_and_operators(
    serve: Serving, method: str, path: str
) -> None:
    keys = await serve(rl=True, api_keys=("client",))
    both = await serve(rl=True, api_keys=("client",), admin_key="boss")
    for served, status in ((keys, 403), (both, 401)):
        for headers in ({}, bearer("client"), bearer("?")):
            assert (await served.http.request(method, path, headers=headers)).status_code == status
    assert (await both.http.request(method, path, headers=bearer("boss"))).status_code != 401


async def test_some_routes_need_no_key(serve: Serving) -> None:
    served = await serve(api_keys=("client",), admin_key="boss", worker_key="worker")
    async with from_host(served, "10.0.0.9") as stranger:
        assert {
            (await stranger.get(path)).status_code
            for path in ("/health", "/ping", "/liveness", "/ready", "/version", "/")
        } == {200}


@pytest.mark.parametrize("site", ["none", "same-origin"])
async def test_a_browser_whose_user_entered_the_address_is_a_local_caller(served: Served, site: str) -> None:
    assert (await served.http.get("/workers", headers={"sec-fetch-site": site})).status_code == 200


async def test_a_page_of_an_allowed_origin_can_send_requests(serve: Serving) -> None:
    served = await serve(cors_origins=("https://a.example",))
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    first = await served.http.options(
        "/v1/chat/completions", headers={**preflight, "access-control-request-headers": "content-type"}
    )
    assert first.headers["access-control-allow-origin"] == "https://a.example"
    headers = {"origin": "https://a.example", "content-type": "application/json"}
    assert (await served.http.post("/v1/chat/completions", content=CHAT, headers=headers)).status_code == 200


async def test_a_preflight_request_of_another_origin_is_refused(serve: Serving) -> None:
    for origins in ((), ("https://a.example",)):
        served = await serve(cors_origins=origins)
        preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
        first = await served.http.options("/v1/chat/completions", headers=preflight)
        assert "access-control-allow-origin" not in first.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/drain", "/workers", "/engine", "/health"])
async def test_a_preflight_request_needs_no_key_and_is_answered_by_no_route(serve: Serving, path: str) -> None:
    served = await serve(api_keys=("client",), admin_key="admin", worker_key="worker")
    first = await served.http.options(path, headers={"authorization": ""})
    assert_error(first, status=405, code="method_not_allowed")


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_a_root_path_in_front_of_a_route_changes_nothing(serve: Serving, prefix: str) -> None:
    served = await serve(root_path="/llm", api_keys=("client",), admin_key="admin")
    assert (await served.http.get(f"{prefix}/health")).status_code == 200
    assert (await served.http.get(f"{prefix}/v1/models", headers=bearer("client"))).status_code == 200
    for key in ("client", "wrong"):
        assert (await served.http.post(f"{prefix}/drain", headers=bearer(key))).status_code == 401
    assert_error(await served.http.get(f"{prefix}/v1/models"), status=401, code="invalid_api_key")
    assert (await served.http.get("/llm/llm/health")).status_code == 401
    document = (await served.http.get(f"{prefix}/openapi.json", headers=bearer("client"))).json()
    assert document["servers"] == [{"url": "/llm"}]


async def test_on_a_unix_domain_socket_any_host_name_is_accepted_and_no_caller_is_local(serve: Serving) -> None:
    """A proxy that connects through a socket passes on the host name of its client."""
    served = await serve(uds="/run/motet.sock")
    assert (await served.http.get("/v1/models", headers={"host": "llm.example"})).status_code == 200
    transport = httpx.ASGITransport(served.app, client=None)  # type: ignore[arg-type]  # as uvicorn describes it
    async with httpx.AsyncClient(transport=transport, base_url="http://llm.example") as http:
        assert_error(await http.post("/drain"), status=403, code="admin_key_required")


@pytest.mark.parametrize(("method", "path"), ENGINE_ROUTES)
async def test_without_a_worker_key_the_routes_of_workers_are_open_only_on_this_machine(
    serve: Serving, method: str, path: str
) -> None:
    served = await serve(api_keys=("client",))
    async with from_host(served, "10.0.0.9") as stranger:
        refused = await stranger.request(method, path, headers=bearer("client"))
    assert_error(refused, status=403, code="worker_key_required")
    assert "--worker-key" in refused.text
    for headers in INDIRECT:
        assert_error(await served.http.request(method, path, headers=headers), status=403, code="worker_key_required")
    assert (await served.http.request(method, path)).status_code not in (401, 403)


async def test_a_client_cannot_end_a_choice_of_another_client(serve: Serving) -> None:
    served = await serve(api_keys=("one", "two"), worker_key="worker")
    body = msgspec.msgpack.encode({"request_id": "g", "index": 0})
    refused = await served.http.post("/engine/stop", content=body, headers={**HEADERS, **bearer("two")})
    assert refused.status_code == 401


@pytest.mark.parametrize("error", [EngineError("the worker does not answer"), EngineDiedError("gone")])
async def test_a_failed_connection_is_not_reported_as_a_fault_of_this_server(serve: Serving, error: MotetError) -> None:
    served = await serve()

    async def connect(_: TransferAddress) -> None:
        raise error

    served.service.connect = connect
    body = msgspec.msgpack.encode(Connect(TransferAddress("x", "10.0.0.1", 5)))
    refused = await served.http.post("/engine/order", content=body, headers=HEADERS)
    assert refused.status_code == (400 if error.status == 500 else 503)
    assert error.message in refused.text


@pytest.mark.slow
async def test_the_number_of_connections_being_made_is_limited(serve: Serving) -> None:
    served = await serve()
    started, may_continue = asyncio.Semaphore(0), asyncio.Event()

    async def connect(_: TransferAddress) -> None:
        started.release()
        await may_continue.wait()

    served.service.connect = connect
    body = msgspec.msgpack.encode(Connect(TransferAddress("x", "10.0.0.1", 5)))
    async with from_host(served, "127.0.0.1") as http, asyncio.TaskGroup() as tasks:

        async def post() -> httpx.Response:
            return await http.post("/engine/order", content=body, headers=HEADERS)

        making = [tasks.create_task(post()) for _ in range(MAX_CONNECTING)]
        for _ in making:
            await started.acquire()
        assert_error(await post(), status=503, code="overloaded")
        may_continue.set()
    assert {one.result().status_code for one in making} == {200}


@pytest.mark.parametrize(("method", "path"), [*OPERATORS_ROUTES, *TRAINERS_ROUTES])
async def test_without_keys_operators_routes_are_open_only_to_callers_on_this_machine(
    serve: Serving, method: str, path: str
) -> None:
    served = await serve(rl=True)
    async with from_host(served, "10.0.0.9") as stranger:
        assert_error(await stranger.request(method, path), status=403, code="admin_key_required")
    for headers in INDIRECT:
        assert (await served.http.request(method, path, headers=headers)).status_code == 403
    assert not served.service.admission.draining


@pytest.mark.parametrize("api_keys", [(), ("client",)])
async def test_operators_with_a_key_can_be_on_any_machine(serve: Serving, api_keys: tuple[str, ...]) -> None:
    served = await serve(api_keys=api_keys, admin_key="k")
    async with from_host(served, "10.0.0.9") as operator:
        assert (await operator.post("/drain")).status_code == 401
        assert (await operator.post("/drain", headers=bearer("k"))).status_code == 200


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", ""])
@pytest.mark.parametrize("page", [{"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}])
async def test_a_page_of_another_site_can_post_only_json(
    served: Served, page: dict[str, str], content_type: str | None
) -> None:
    headers = page if content_type is None else page | {"content-type": content_type}
    refused = await served.http.post("/v1/chat/completions", content=CHAT, headers=headers)
    assert_error(refused, status=400, code="invalid_content_type")
    assert served.engine.requests == []


async def test_a_client_that_is_not_a_browser_needs_no_content_type(served: Served) -> None:
    assert (await served.http.post("/v1/chat/completions", content=CHAT)).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[::2]", "[", "@"])
async def test_a_server_on_loopback_refuses_other_host_names(served: Served, host: str) -> None:
    refused = await served.http.get("/status", headers={"host": host})
    assert_error(refused, status=403, code="host_not_allowed")
    assert "--allowed-host" in refused.text


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "motet.example:443"])
async def test_a_server_on_loopback_accepts_its_own_host_names(serve: Serving, host: str) -> None:
    served = await serve(allowed_hosts=("Motet.example",))
    assert (await served.http.get("/status", headers={"host": host})).status_code == 200


async def test_a_server_on_another_address_accepts_every_host_name(serve: Serving) -> None:
    served = await serve(config=ServerConfig(served_model_name=MODEL, host="0.0.0.0"))
    assert (await served.http.get("/status", headers={"host": "motet.example"})).status_code == 200


async def test_no_header_changes_the_address_of_the_client(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    addresses: list[object] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        addresses.append(scope["client"][0])
        await served.app(scope, receive, send)

    server = HttpServer(app)
    with listen("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
            url = f"http://127.0.0.1:{port_of(listener)}/engine"
            refused = await http.get(url, headers={"x-forwarded-for": "10.1.2.3"})
        server.stop(at_once=True)
        await serving
    assert (addresses, refused.status_code) == (["127.0.0.1"], 403)


async def test_a_group_with_the_worker_key_is_answered(serve: Serving) -> None:
    served = await serve(api_keys=("client",), worker_key="worker")
    headers = {**HEADERS, **bearer("worker")}
    answer = await served.http.post("/engine/generate", content=msgspec.msgpack.encode(group()), headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("code", "keys"), [("worker_key_required", [None, "Bearer worker"]), ("invalid_api_key", [None])]
)
async def test_a_server_gets_the_worker_key_only_after_it_has_identified_as_a_motet_server(
    code: str, keys: list[str | None]
) -> None:
    sent: list[str | None] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["path"] == "/engine":
            sent.append(headers.get("authorization"))
        error = {"error": {"message": "no", "code": code}}
        await JSONResponse(error, 401)(scope, receive, send)

    async with serving(app) as (server, _, _), server_client() as client:
        (listening,) = server.servers
        url = url_of(listening.sockets[0])
        found = ProbeSettings(config=GatewayConfig(), client=client, worker_key="worker").server(NamedWorker(url), "a")
        with pytest.raises(EngineError):
            await found.report()
    assert sent == keys
