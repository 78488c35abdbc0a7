"""The routes for LoRA adapters: who can call them, and which bodies are refused."""

from typing import Any

import pytest

from tests.api.serving import Serving
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio

POET = {"lora_name": "poet", "lora_path": "/adapters/poet"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "lora_name"),
        ({"lora_name": "poet"}, "lora_path"),
        (POET | {"lora_name": ""}, "lora_name"),
        (POET | {"lora_name": "x" * 257}, "lora_name"),
        (POET | {"rank": 8}, "rank"),
    ],
)
async def test_a_body_that_is_not_valid_is_refused_by_field(serve: Serving, body: dict[str, Any], param: str) -> None:
    served = await serve()
    assert_error(await served.http.post("/v1/load_lora_adapter", json=body), status=400, param=param)


async def test_a_name_that_no_adapter_can_have_is_refused_with_the_reason(serve: Serving) -> None:
    served = await serve()
    refused = await served.http.post("/v1/load_lora_adapter", json=POET | {"lora_name": "a b"})
    message = "Invalid 'lora_name': a name has no white space, no '=' or ',', and no '/' at its ends."
    assert_error(refused, status=400, param="lora_name", message=message)
    headers = {"content-type": "application/octet-stream"}
    refused = await served.http.post("/v1/load_lora_adapter", content=b"", headers=headers)
    assert_error(refused, status=400, param="lora_name", code="missing_required_parameter")


async def test_servers_without_vllm_workers_have_no_adapters(serve: Serving) -> None:
    served = await serve()
    refused = await served.http.post("/v1/load_lora_adapter", json=POET)
    assert_error(refused, status=404, code="no_adapters")


async def test_clients_cannot_change_adapters(serve: Serving) -> None:
    served = await serve(api_keys=("client",), admin_key="admin")
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        for headers in ({}, {"authorization": "Bearer client"}):
            assert (await served.http.post(path, json=POET, headers=headers)).status_code == 401
