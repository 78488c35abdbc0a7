"""`/workers`: only operators can list, add, drain and remove workers."""

import math

import pytest

from motet.api.service import Membership
from motet.engine_info import EngineKind
from motet.errors import NotFoundError, RequestError
from motet.settings.named_worker import NamedWorker
from motet.types import Role
from tests.api.serving import Served, Serving
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio

ADMIN = {"authorization": "Bearer boss"}
CLIENT = {"authorization": "Bearer k"}
URL = "http://10.0.0.1:8000"
CHANGES = (
    ("POST", "/workers", {"url": URL}),
    ("POST", "/workers/decode-0/drain", None),
    ("DELETE", "/workers/decode-0", None),
)


class FakeMembership:
    """A membership that knows `decode-0` and every worker that joins."""

    def __init__(self) -> None:
        self.ids = ["decode-0"]
        self.calls: list[tuple[object, ...]] = []

    async def join(self, named: NamedWorker, id: str | None) -> str:
        self.calls.append(("join", named, id))
        name = id or f"remote-{len(self.ids)}"
        if name in self.ids:
            raise RequestError(f"There is a worker {name} already.", param="id", code="duplicate_worker")
        self.ids.append(name)
        return name

    async def leave(self, id: str, drain_s: float) -> None:
        self._find(id)
        self.calls.append(("leave", id, drain_s))

    async def drain(self, id: str) -> None:
        self._find(id)
        self.calls.append(("drain", id))

    def _find(self, id: str) -> None:
        if id not in self.ids:
            raise NotFoundError(f"There is no worker {id}.", code="unknown_worker")


@pytest.fixture
def membership() -> FakeMembership:
    return FakeMembership()


async def server(
    serve: Serving, membership: FakeMembership | None, *, admin_key: str = "boss", api_keys: tuple[str, ...] = ()
) -> Served:
    changes = None if membership is None else Membership(membership.join, membership.leave, membership.drain)
    return await serve(membership=changes, admin_key=admin_key, api_keys=api_keys, drain_timeout_s=12.0)


async def test_a_worker_joins_by_its_url(serve: Serving, membership: FakeMembership) -> None:
    served = await server(serve, membership)
    joined = await served.http.post("/workers", json={"url": URL}, headers=ADMIN)
    assert (joined.status_code, joined.json()) == (201, {"id": "remote-1", "state": "starting"})
    body = {"url": f"{URL}/v1", "role": "prefill", "kind": "vllm", "id": "my-prefill.1"}
    assert (await served.http.post("/workers", json=body, headers=ADMIN)).json()["id"] == "my-prefill.1"
    assert membership.calls == [
        ("join", NamedWorker(URL), None),
        ("join", NamedWorker(URL, Role.PREFILL, EngineKind.VLLM), "my-prefill.1"),
    ]


async def test_a_worker_is_drained_and_removed(serve: Serving, membership: FakeMembership) -> None:
    served = await server(serve, membership)
    for method, path in (
        ("POST", "/workers/decode-0/drain"),
        ("DELETE", "/workers/decode-0"),
        ("DELETE", "/workers/decode-0?drain_timeout=0.5"),
    ):
        response = await served.http.request(method, path, headers=ADMIN)
        assert (response.status_code, response.json()) == (202, {"id": "decode-0", "state": "draining"})
    assert membership.calls == [("drain", "decode-0"), ("leave", "decode-0", 12.0), ("leave", "decode-0", 0.5)]


@pytest.mark.parametrize("seconds", [-1, math.inf, math.nan, "long"])
async def test_a_removal_takes_seconds(serve: Serving, membership: FakeMembership, seconds: float | str) -> None:
    served = await server(serve, membership)
    response = await served.http.delete(f"/workers/decode-0?drain_timeout={seconds}", headers=ADMIN)
    assert_error(response, status=400, param="drain_timeout")
    assert membership.calls == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "url"),
        ({"url": "10.0.0.1:8000"}, "url"),
        ({"url": "file:///etc/passwd"}, "url"),
        ({"url": URL, "role": "cook"}, "role"),
        ({"url": URL, "kind": "sglang"}, "kind"),
        ({"url": URL, "id": "two, names"}, "id"),
        ({"url": URL, "id": "a/b"}, "id"),
        ({"url": URL, "id": "é"}, "id"),
        ({"url": URL, "key": "x"}, "key"),
    ],
)
async def test_an_invalid_worker_is_a_400_that_names_the_field(
    serve: Serving, membership: FakeMembership, body: dict[str, str], param: str
) -> None:
    served = await server(serve, membership)
    assert_error(await served.http.post("/workers", json=body, headers=ADMIN), status=400, param=param)
    assert membership.calls == []


async def test_a_refusal_by_the_membership_has_its_status(serve: Serving) -> None:
    served = await server(serve, FakeMembership())
    twice = await served.http.post("/workers", json={"url": URL, "id": "decode-0"}, headers=ADMIN)
    assert_error(twice, status=400, code="duplicate_worker")
    for method, path in (("DELETE", "/workers/decode-9"), ("POST", "/workers/decode-9/drain")):
        assert_error(await served.http.request(method, path, headers=ADMIN), status=404, code="unknown_worker")


async def test_the_list_of_workers_equals_that_of_the_status(serve: Serving) -> None:
    for membership in (None, FakeMembership()):
        served = await server(serve, membership, admin_key="")
        listed = (await served.http.get("/workers")).json()
        assert listed == {"workers": (await served.http.get("/status")).json()["workers"]}


async def test_fixed_workers_cannot_be_changed(serve: Serving) -> None:
    served = await server(serve, None)
    for method, path, body in CHANGES:
        refused = await served.http.request(method, path, json=body, headers=ADMIN)
        assert_error(refused, status=404, code="fixed_workers")
        assert "fixed" in refused.json()["error"]["message"]


async def test_without_an_admin_key_workers_are_not_changed(serve: Serving, membership: FakeMembership) -> None:
    served = await server(serve, membership, admin_key="", api_keys=("k",))
    for method, path, body in CHANGES:
        refused = await served.http.request(method, path, json=body, headers=CLIENT)
        assert_error(refused, status=403, type="permission_error", code="admin_key_required")
        assert "--admin-key" in refused.json()["error"]["message"]
    assert membership.calls == []
    assert (await served.http.get("/workers", headers=CLIENT)).status_code == 200
    assert (await served.http.get("/workers")).status_code == 401


async def test_no_key_of_a_client_drains_a_server_without_an_admin_key(serve: Serving) -> None:
    served = await server(serve, None, admin_key="", api_keys=("k",))
    for headers in ({}, CLIENT):
        refused = await served.http.post("/drain", headers=headers)
        assert_error(refused, status=403, code="admin_key_required")
        assert "--admin-key" in refused.json()["error"]["message"]
    assert not served.service.admission.draining
    assert (await served.http.get("/v1/models", headers=CLIENT)).status_code == 200


@pytest.mark.parametrize("api_keys", [(), ("k",)])
async def test_the_routes_of_operators_need_the_admin_key_and_no_other(
    serve: Serving, membership: FakeMembership, api_keys: tuple[str, ...]
) -> None:
    served = await server(serve, membership, api_keys=api_keys)
    for method, path, body in (*CHANGES, ("GET", "/workers", None), ("POST", "/drain", None)):
        for headers in ({}, CLIENT, {"authorization": "Basic boss"}):
            refused = await served.http.request(method, path, json=body, headers=headers)
            assert_error(refused, status=401, code="invalid_api_key")
    assert membership.calls == []
    assert not served.service.admission.draining
    assert (await served.http.post("/drain", headers=ADMIN)).status_code == 200
    assert served.service.admission.draining


async def test_the_admin_key_is_no_api_key(serve: Serving) -> None:
    served = await server(serve, FakeMembership(), api_keys=("k",))
    assert (await served.http.get("/status", headers=ADMIN)).status_code == 401
    assert (await served.http.get("/status", headers=CLIENT)).status_code == 200
    alone = await server(serve, FakeMembership())
    assert (await alone.http.get("/status")).status_code == 200
