"""A gateway process in front of text upstreams: it provides n where they do not support it, and replaces lost ones."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types.chat import ChatCompletionUserMessageParam

from motet.settings.server_config import environment
from tests.forked import ForkingProcess
from tests.patience import PATIENCE_S
from tests.peers.fake_openai import FakeOpenAI
from tests.peers.openai_script import Behaviour, Index

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

HI: ChatCompletionUserMessageParam = {"role": "user", "content": "hi"}
EXPECTED = ["hi 4", "hi 5 w0", "hi 6 w0 w1"]


@asynccontextmanager
async def gateway(
    forking: ForkingProcess, tmp_path: Path, *workers: str, name: str | None = None
) -> AsyncIterator[AsyncOpenAI]:
    """Starts a gateway in front of these workers, and yields a client of it. `name` is the gateway's name for their
    first model."""
    arguments = [part for worker in workers for part in ("--worker", worker)]
    arguments += [] if name is None else ["--served-model-name", name]
    child = forking.server(arguments, command="gateway", environ={**environment(), "TMPDIR": str(tmp_path)})
    await asyncio.to_thread(child.__enter__)
    try:
        http = DefaultAsyncHttpxClient(verify=False)
        async with AsyncOpenAI(base_url=f"{child.url}/v1", api_key="k", max_retries=0, http_client=http) as client:
            yield client
    finally:
        await asyncio.to_thread(child.__exit__, None, None, None)


async def chat(client: AsyncOpenAI, model: str = "m") -> list[str]:
    """Returns the texts of three streamed choices."""
    texts = ["", "", ""]
    stream = await client.chat.completions.create(model=model, messages=[HI], n=3, seed=4, stream=True)
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    return texts


async def until_listed(client: AsyncOpenAI, names: list[str]) -> None:
    """Polls the list of models. A gateway is ready as soon as its first worker is, and does not report when the others
    are."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if sorted([model.id async for model in client.models.list()]) == names:
                return
            await asyncio.sleep(0.05)


async def test_servers_are_found_and_each_gives_n_choices(forking: ForkingProcess, tmp_path: Path) -> None:
    deviating = Behaviour(ignores_n=True, index=Index.ZERO, models=({"id": "deviating"},))
    async with FakeOpenAI() as conforming, FakeOpenAI(deviating) as other:
        async with gateway(forking, tmp_path, conforming.url, f"{other.url},openai") as client:
            await until_listed(client, ["deviating", "m"])
            assert await chat(client, "deviating") == EXPECTED
            assert await chat(client, "m") == EXPECTED
        assert {request.headers["authorization"] for request in conforming.requests if "seed" in request.body} == {
            "Bearer k"
        }


async def test_a_model_can_have_another_name_for_clients(forking: ForkingProcess, tmp_path: Path) -> None:
    async with FakeOpenAI(Behaviour(models=({"id": "m"},))) as peer:
        async with gateway(forking, tmp_path, peer.url, name="shown") as client:
            assert await chat(client, "shown") == EXPECTED
            (card,) = [model async for model in client.models.list()]
        assert (card.id, card.model_dump()["max_model_len"]) == ("shown", None)
        assert {request.body["model"] for request in peer.requests} == {"m"}


async def test_a_lost_server_is_replaced_or_the_error_reports_it(forking: ForkingProcess, tmp_path: Path) -> None:
    async with (
        FakeOpenAI() as staying,
        FakeOpenAI() as leaving,
        gateway(forking, tmp_path, leaving.url, staying.url) as client,
    ):
        assert await chat(client) == EXPECTED
        await leaving.close()
        for _ in range(3):
            assert await chat(client) == EXPECTED
        await staying.close()
        with pytest.raises(APIStatusError) as caught:
            await chat(client)
        assert caught.value.status_code == 503
