"""The bodies of control routes: every option in them is read, in both forms, or the request is refused by name."""

import pytest

from motet.types import PauseMode
from tests.api.noted_control import NotedControl
from tests.api.serving import Served, Serving
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio

ROUTES = (
    *("/pause", "/resume", "/reset_prefix_cache", "/sleep", "/wake_up", "/start_weight_update"),
    *("/shutdown_weight_transfer_engine", "/pause_generation", "/continue_generation", "/flush_cache"),
    *("/abort_requests", "/abort_request", "/update_weight_version", "/weight_checker", "/finish_weight_update"),
    *("/update_weights", "/update_weights_from_disk", "/init_weight_transfer_engine"),
)


@pytest.mark.parametrize("path", ROUTES)
async def test_an_unknown_field_is_refused_by_name(trained: Served, path: str) -> None:
    assert_error(await trained.http.post(path, json={"nonsense": 1}), status=400)


@pytest.mark.parametrize("path", ["/drain", "/workers/engine-0/drain", "/workers/engine-0/kill"])
async def test_operators_routes_refuse_unknown_fields_too(serve: Serving, path: str) -> None:
    served = await serve(admin_key="admin")
    headers = {"authorization": "Bearer admin"}
    assert_error(await served.http.post(path, json={"nonsense": 1}, headers=headers), status=400, param="nonsense")
    assert not served.service.admission.draining


@pytest.mark.parametrize("body", [{"mode": "keep"}, {"model": "tiny", "options": {"mode": "keep"}}])
async def test_a_pause_has_the_mode_of_its_body(
    trained: Served, control: NotedControl, body: dict[str, object]
) -> None:
    assert (await trained.http.post("/pause", json=body)).json() == {"status": "paused"}
    assert (await trained.http.post("/resume", json={"model": "tiny"})).json() == {"status": "resumed"}
    assert control.calls == [PauseMode.KEEP]


async def test_prefix_caches_are_emptied_as_the_body_says(trained: Served, control: NotedControl) -> None:
    for body in ({"reset_running_requests": True}, {"options": {"reset_running_requests": True}}, {}):
        assert (await trained.http.post("/reset_prefix_cache", json=body)).json() == {"success": True}
    assert (await trained.http.post("/clear_kv_blocks", json={})).json() == {"success": True}
    assert control.calls == [True, True, False, False]


async def test_vllm_s_trainers_can_say_that_weights_are_in_the_form_of_a_checkpoint(trained: Served) -> None:
    for given, status in ((True, 200), (False, 400)):
        answer = await trained.http.post("/start_weight_update", json={"is_checkpoint_format": given})
        assert answer.status_code == status
