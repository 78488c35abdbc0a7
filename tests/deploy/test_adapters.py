"""LoRA adapters of the vLLM workers of a gateway: loaded, requested through both hops, and unloaded at run time."""

from pathlib import Path

import httpx
import pytest

from motet.deploy.gateway_models import TokenizerRules
from motet.engine import WorkerState
from tests.deploy.gateways import ADMIN, RunningGateway
from tests.error_response import assert_error
from tests.peers.fake_vllm import MODEL, FakeVLLM
from tests.peers.vllm_tickets import Network

pytestmark = pytest.mark.anyio

PROMPT = list(range(10, 50))
POET = {"lora_name": "poet", "lora_path": "/adapters/poet"}


def gateway_of(folder: Path, *servers: FakeVLLM | str) -> RunningGateway:
    workers = [server if isinstance(server, str) else server.url for server in servers]
    return RunningGateway(*workers, tokenizers=TokenizerRules({}, others=folder))


async def load(gateway: RunningGateway, **body: object) -> httpx.Response:
    return await gateway.http.post("/v1/load_lora_adapter", json=POET | body, headers=ADMIN)


async def unload(gateway: RunningGateway, name: str = "poet") -> httpx.Response:
    return await gateway.http.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=ADMIN)


async def generated(gateway: RunningGateway, model: str, n: int = 1) -> httpx.Response:
    sampling = {"n": n, "max_tokens": 3, "ignore_eos": True, "seed": 5}
    body = {"model": model, "token_ids": PROMPT, "sampling_params": sampling}
    return await gateway.http.post("/inference/v1/generate", json=body)


async def models_of(gateway: RunningGateway) -> dict[str, str | None]:
    """Returns the parent of each model."""
    return {card["id"]: card["parent"] for card in (await gateway.http.get("/v1/models")).json()["data"]}


@pytest.mark.slow
async def test_an_adapter_is_loaded_by_all_vllm_workers_and_unloaded_again(folder: Path) -> None:
    async with FakeVLLM() as one, FakeVLLM() as two, gateway_of(folder, one, two) as gateway:
        loaded = await load(gateway)
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'poet' added successfully.")
        assert [server.adapter_paths for server in (one, two)] == [{"poet": "/adapters/poet"}] * 2
        described = (await gateway.http.get("/openapi.json")).json()["paths"]["/v1/load_lora_adapter"]["post"]
        assert loaded.headers["content-type"].partition(";")[0] in described["responses"]["200"]["content"]
        assert await models_of(gateway) == {MODEL: None, "poet": MODEL}
        assert (await generated(gateway, "poet")).status_code == 200
        assert_error(await load(gateway), status=400, param="lora_name", code="adapter_exists")
        assert (await load(gateway, lora_path="/adapters/new", load_inplace=True)).status_code == 200
        assert [server.adapter_paths["poet"] for server in (one, two)] == ["/adapters/new"] * 2
        assert (await unload(gateway)).text == "Success: LoRA adapter 'poet' removed successfully."
        assert (one.adapters, two.adapters) == ((), ())
        assert_error(await generated(gateway, "poet"), status=404, code="model_not_found")
        assert_error(await unload(gateway), status=404, code="model_not_found", param="lora_name")


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 4])
async def test_an_adapter_passes_both_hops_with_its_own_ticket(folder: Path, n: int) -> None:
    network = Network()
    async with (
        FakeVLLM(network=network) as prefill,
        FakeVLLM(network=network) as decode,
        gateway_of(folder, f"{prefill.url},prefill", f"{decode.url},decode") as gateway,
    ):
        assert (await load(gateway)).status_code == 200
        await decode.until(lambda: network.transfers == 1 and decode.open == 0)  # the servers are connected
        for server in (prefill, decode):
            server.requests.clear()
        transfers = network.transfers
        answer = await generated(gateway, "poet", n)
        assert answer.status_code == 200, answer.text
        prefills = [request for request in prefill.requests if len(request.prompt) == len(PROMPT)]
        decodes = [request for request in decode.requests if len(request.prompt) == len(PROMPT)]
        assert [request.model for request in prefills] == ["poet"]
        assert {request.model for request in decodes} == {"poet"}
        assert network.transfers == transfers + 1
        assert answer.headers["x-motet-prefill-worker"] == prefill.url.removeprefix("http://")
        prefill.check()
        decode.check()


@pytest.mark.slow
async def test_if_one_worker_cannot_load_an_adapter_none_keeps_it(folder: Path) -> None:
    async with FakeVLLM() as one, FakeVLLM() as two, gateway_of(folder, one, two) as gateway:
        two.switches.unreadable = ("/adapters/poet",)
        refused = await load(gateway)
        assert_error(refused, status=400)
        assert "No adapter found for /adapters/poet" in refused.json()["error"]["message"]
        assert str(two.port) in refused.json()["error"]["message"]
        assert (one.adapters, two.adapters) == ((), ())
        two.switches.changes_adapters = False
        refused = await load(gateway)
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in refused.json()["error"]["message"]
        assert one.adapters == ()


@pytest.mark.slow
async def test_a_worker_that_has_the_adapter_already_is_left_alone(folder: Path) -> None:
    async with FakeVLLM(adapters=("poet",)) as one, FakeVLLM() as two, gateway_of(folder, one, two) as gateway:
        assert (await load(gateway)).status_code == 200
        assert (one.adapter_paths, two.adapter_paths) == ({}, {"poet": "/adapters/poet"})


@pytest.mark.slow
async def test_with_several_models_the_base_model_is_named(folder: Path) -> None:
    async with FakeVLLM() as one, FakeVLLM(model="other") as two, gateway_of(folder, one, two) as gateway:
        assert_error(await load(gateway), status=400, param="base_model_name")
        assert_error(await load(gateway, base_model_name="none"), status=404, param="base_model_name")
        assert (await load(gateway, base_model_name="other")).status_code == 200
        assert (one.adapters, two.adapters) == ((), ("poet",))
        name = {"lora_name": "other", "base_model_name": "other"}
        assert_error(await load(gateway, **name), status=400, param="lora_name")


@pytest.mark.slow
async def test_without_a_worker_that_answers_adapters_are_refused_with_503(folder: Path) -> None:
    async with FakeVLLM() as server, gateway_of(folder, server) as gateway:
        await server.kill()
        await gateway.until_state(server.url.removeprefix("http://"), WorkerState.DEAD)
        assert_error(await load(gateway), status=503)


@pytest.mark.slow
async def test_a_vllm_worker_that_restarts_gets_the_adapters_again_and_loses_the_unloaded_ones(folder: Path) -> None:
    async with FakeVLLM(adapters=("mine",)) as server, gateway_of(folder, server) as gateway:
        assert (await load(gateway)).status_code == 200
        assert (await unload(gateway, "mine")).status_code == 200
        worker = server.url.removeprefix("http://")
        await server.kill()
        await gateway.until_state(worker, WorkerState.DEAD)
        server.adapters = ("mine",)  # as on its command line
        server.adapter_paths.clear()
        await server.start()
        await gateway.until_state(worker, WorkerState.READY)
        assert (server.adapters, server.adapter_paths) == (("poet",), {"poet": "/adapters/poet"})


@pytest.mark.slow
async def test_a_vllm_worker_that_does_not_answer_gets_an_adapter_when_it_returns(folder: Path) -> None:
    async with FakeVLLM() as one, FakeVLLM() as two, gateway_of(folder, one, two) as gateway:
        worker = two.url.removeprefix("http://")
        await two.kill()
        await gateway.until_state(worker, WorkerState.DEAD)
        assert (await load(gateway)).status_code == 200
        await two.start()
        await gateway.until_state(worker, WorkerState.READY)
        assert [server.adapter_paths for server in (one, two)] == [{"poet": "/adapters/poet"}] * 2
