"""vLLM servers that change what they serve while a gateway has them, and servers that tell little of themselves."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.deploy.gateways import RunningGateway
from tests.deploy.test_vllm_gateway import body, gateway_of, generated, seeded
from tests.peers.fake_vllm import MODEL, FakeVLLM

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def until_listed(gateway: RunningGateway, *names: str) -> None:
    fleet = gateway.gateway.router.fleet
    while tuple(fleet.models()) != names:
        await fleet.changed()


async def test_an_adapter_that_is_loaded_while_its_server_runs_becomes_a_model_and_goes_when_it_is_unloaded(
    folder: Path,
) -> None:
    async with FakeVLLM() as server, gateway_of(folder, server) as gateway:
        server.adapters = ("poet",)
        await until_listed(gateway, MODEL, "poet")
        listed = (await gateway.http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in listed] == [(MODEL, None), ("poet", MODEL)]
        answer = await asked_of_poet(gateway)
        assert answer.status_code == 200, answer.text
        server.adapters = ()
        await until_listed(gateway, MODEL)
        gone = await asked_of_poet(gateway)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")


async def test_an_adapter_that_one_server_has_just_lost_is_asked_of_another(folder: Path) -> None:
    """Before the gateway has heard of it: a client was told that the model does not exist."""
    async with (
        FakeVLLM(adapters=("poet",)) as one,
        FakeVLLM(adapters=("poet",)) as other,
        gateway_of(folder, one, other) as gateway,
    ):
        one.asked.clear()
        one.adapters = ()
        answers = [await asked_of_poet(gateway) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert not one.asked


async def test_an_adapter_that_nobody_has_any_more_is_refused_and_then_unknown(folder: Path) -> None:
    async with FakeVLLM(adapters=("poet",)) as server, gateway_of(folder, server) as gateway:
        server.adapters = ()
        refused = await asked_of_poet(gateway)
        assert refused.status_code == 503
        assert "has the model no more" in refused.json()["error"]["message"]
        await until_listed(gateway, MODEL)
        assert (await asked_of_poet(gateway)).status_code == 404


async def asked_of_poet(gateway: RunningGateway) -> httpx.Response:
    return await gateway.http.post("/inference/v1/generate", json=body(1) | {"model": "poet"})


async def test_a_server_that_does_not_tell_its_blocks_gets_several_groups_at_once(folder: Path) -> None:
    """With none, nothing would seem to fit beside another group."""
    async with FakeVLLM() as server:
        server.switches.tells_blocks = False
        async with gateway_of(folder, server) as gateway:
            server.hold()
            asked = [asyncio.ensure_future(generated(gateway, 3, seed=seed)) for seed in (5, 9)]
            await server.until(lambda: server.open == 2)
            server.run()
            assert [await one for one in asked] == [seeded(3, 5), seeded(3, 9)]
