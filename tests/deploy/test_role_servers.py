"""A decode server and the prefill servers it asks, each a server of its own."""

from pathlib import Path

import pytest

from motet.config import CellConfig
from motet.deploy.server import Outcome
from motet.engines.fake_leases import FakeLeases
from motet.types import Role
from tests.deploy.dying import Starter
from tests.deploy.running import Running

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def asking(*urls: str) -> CellConfig:
    return CellConfig(prefill_urls=urls, bypass_tokens=0)


def ended_well(stream: str) -> bool:
    return stream.count('"finish_reason":"stop"') == 2 and stream.endswith("data: [DONE]\n\n")


async def test_a_decode_server_meets_its_prefill_server_and_has_prompts_prefilled_there(folder: Path) -> None:
    leases = FakeLeases()
    async with Running(folder, role=Role.PREFILL, starter=Starter(leases=leases)) as prefill:
        url = str(prefill.http.base_url)
        async with Running(folder, role=Role.DECODE, cell=asking(url), starter=Starter(leases=leases)) as decode:
            await decode.engine.has_met.wait()
            assert decode.engine.met == [prefill.engine.info.transfer]
            decode.engine.let_run()
            assert ended_well((await decode.chat()).text)
            assert (len(prefill.engine.prefills), decode.engine.pulls) == (1, 1)
            assert leases.held == {}
            decode.signals.ask()
            assert await decode.outcome() is Outcome.STOPPED
        assert (await prefill.http.get("/health")).status_code == 200


async def test_a_decode_server_lists_its_prefill_servers_by_their_urls(folder: Path) -> None:
    cell = asking("http://127.0.0.1:1", "http://127.0.0.1:2")
    async with Running(folder, role=Role.DECODE, cell=cell) as decode:
        workers = (await decode.http.get("/status")).json()["workers"]
        assert [(worker["id"], worker["role"], worker["address"]) for worker in workers] == [
            ("decode-0", "decode", decode.http.base_url.netloc.decode()),
            ("prefill-0", "prefill", "http://127.0.0.1:1"),
            ("prefill-1", "prefill", "http://127.0.0.1:2"),
        ]


async def test_without_its_prefill_server_a_decode_server_does_everything_itself(folder: Path) -> None:
    async with Running(folder, role=Role.DECODE, cell=asking("http://127.0.0.1:1")) as decode:
        decode.engine.let_run()
        assert ended_well((await decode.chat()).text)
        assert decode.engine.pulls == 0
        assert (await decode.http.get("/status")).json()["totals"]["bypasses"] == 1


async def test_a_decode_server_ends_with_its_engine_whatever_prefill_servers_there_are(folder: Path) -> None:
    async with Running(folder, role=Role.PREFILL) as prefill:
        async with Running(folder, role=Role.DECODE, cell=asking(str(prefill.http.base_url))) as decode:
            decode.engine.die()
            assert await decode.outcome() is Outcome.ENGINE_DIED
        assert not prefill.ended.done()
