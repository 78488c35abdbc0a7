"""A gateway process in front of text upstreams: it offers n where they do not, and replaces a lost one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types.chat import ChatCompletionUserMessageParam

from motet.settings.server_config import environment
from tests.forked import ForkingProcess
from tests.peers.fake_openai import FakeOpenAI
from tests.peers.openai_script import Index, Manners

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

HI: ChatCompletionUserMessageParam = {"role": "user", "content": "hi"}
SAID = ["hi 4", "hi 5 w0", "hi 6 w0 w1"]


@asynccontextmanager
async def gateway(
    forking: ForkingProcess, tmp_path: Path, *workers: str, name: str | None = None
) -> AsyncIterator[AsyncOpenAI]:
    """A client of a gateway in front of these workers. `name` is the gateway's name for their first model."""
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
    """The gateway is ready as soon as its first worker is. Nothing tells when the others have come."""
    for _ in range(600):
        listed = sorted([model.id async for model in client.models.list()])
        if listed == names:
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"{listed} are listed, and not {names}")


async def test_servers_are_found_and_each_gives_n_choices(forking: ForkingProcess, tmp_path: Path) -> None:
    deviating = Manners(ignores_n=True, index=Index.ZERO, models=({"id": "deviating"},))
    async with FakeOpenAI() as honest, FakeOpenAI(deviating) as other:
        async with gateway(forking, tmp_path, honest.url, f"{other.url},openai") as client:
            await until_listed(client, ["deviating", "m"])
            assert await chat(client, "deviating") == SAID
            assert await chat(client, "m") == SAID
        assert {asked.headers["authorization"] for asked in honest.asked if "seed" in asked.body} == {"Bearer k"}


async def test_a_model_may_have_another_name_for_clients(forking: ForkingProcess, tmp_path: Path) -> None:
    async with FakeOpenAI(Manners(models=({"id": "m"},))) as peer:
        async with gateway(forking, tmp_path, peer.url, name="shown") as client:
            assert await chat(client, "shown") == SAID
            (card,) = [model async for model in client.models.list()]
        assert (card.id, card.model_dump()["max_model_len"]) == ("shown", None)
        assert {asked.body["model"] for asked in peer.asked} == {"m"}


async def test_a_server_that_goes_is_replaced_or_the_error_says_that_it_is_gone(
    forking: ForkingProcess, tmp_path: Path
) -> None:
    async with (
        FakeOpenAI() as staying,
        FakeOpenAI() as leaving,
        gateway(forking, tmp_path, leaving.url, staying.url) as client,
    ):
        assert await chat(client) == SAID
        await leaving.close()
        for _ in range(3):
            assert await chat(client) == SAID
        await staying.close()
        with pytest.raises(APIStatusError) as caught:
            await chat(client)
        assert caught.value.status_code == 503
