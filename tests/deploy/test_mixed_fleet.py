"""One gateway in front of servers of every kind, with several models."""

import asyncio
from pathlib import Path

import pytest

from motet.deploy.gateway_models import TokenizerRules
from motet.engine import WorkerState
from motet.engines.upstream.upstream_server import PROBE_S
from motet.engines.vllm.report import scrape_of
from tests.deploy.gateways import ADMIN, RunningGateway, address, id_of
from tests.deploy.running import Running
from tests.error_response import assert_error
from tests.peers.fake_openai import FakeOpenAI
from tests.peers.fake_vllm import MODEL, FakeVLLM
from tests.peers.openai_script import Manners

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

OURS, TEXTS = "tiny", "texts"


def texts_peer() -> FakeOpenAI:
    return FakeOpenAI(Manners(models=({"id": TEXTS, "max_model_len": 99},)))


def gateway_to(folder: Path, *workers: Running | FakeVLLM | FakeOpenAI) -> RunningGateway:
    urls = [worker if isinstance(worker, Running) else worker.url for worker in workers]
    return RunningGateway(*urls, tokenizers=TokenizerRules({MODEL: folder}))


async def test_every_model_of_every_kind_is_listed_and_answers(folder: Path) -> None:
    async with (
        Running(folder) as ours,
        FakeVLLM(adapters=("poet",)) as vllm,
        texts_peer() as texts,
        gateway_to(folder, ours, vllm, texts) as gateway,
    ):
        ours.engine.let_run()
        name = ours.engine.info.model
        assert gateway.models == [name, MODEL, "poet", TEXTS]
        listed = (await gateway.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == [name, MODEL, "poet", TEXTS]
        for model in gateway.models:
            body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 4}
            answer = await gateway.http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1]
            assert answer.json()["model"] == model
        workers = (await gateway.http.get("/status")).json()["workers"]
        assert [(worker["kind"], worker["state"], worker["resumable"]) for worker in workers] == [
            ("motet", "ready", True),
            ("vllm", "ready", True),
            ("openai", "ready", False),
        ]
        unknown = await gateway.http.post("/v1/completions", json={"model": "nobody", "prompt": "hi"})
        assert_error(unknown, status=404, code="model_not_found")
        vllm.check()


async def test_a_server_of_ours_with_vllm_s_metrics_is_found_to_be_one_of_ours(folder: Path) -> None:
    async with Running(folder, metric_prefix="vllm") as ours, gateway_to(folder, ours) as gateway:
        scrape_of((await ours.http.get("/metrics")).content)  # raises unless it could be taken for a vLLM server
        (worker,) = (await gateway.http.get("/status")).json()["workers"]
        assert (worker["kind"], worker["state"]) == ("motet", "ready")


async def test_a_model_is_known_while_its_last_worker_is_away_until_that_leaves(folder: Path) -> None:
    async with FakeVLLM() as vllm, texts_peer() as texts, gateway_to(folder, vllm, texts) as gateway:
        id = vllm.url.removeprefix("http://")
        ask = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
        vllm.switches.healthy = False
        await gateway.until_state(id, WorkerState.DEAD)
        away = await gateway.http.post("/v1/completions", json=ask)
        assert_error(away, status=503, code="no_worker")
        await gateway.http.delete(f"/workers/{id}", headers=ADMIN)
        await gateway.until_state(id, None)
        gone = await gateway.http.post("/v1/completions", json=ask)
        assert_error(gone, status=404, code="model_not_found")


async def test_a_model_keeps_its_compiled_grammars_while_others_come_and_go(folder: Path) -> None:
    """Each change of the fleet used to make every model anew, and the vocabulary of its grammars with it."""
    async with Running(folder) as ours, texts_peer() as texts, gateway_to(folder, ours, texts) as gateway:
        served = gateway.service.served(ours.engine.info.model)
        before_change, grammars = gateway.gateway.router.fleet.catalog.models(), served.grammars
        await gateway.http.delete(f"/workers/{texts.url.removeprefix('http://')}", headers=ADMIN)
        await gateway.until_state(texts.url.removeprefix("http://"), None)
        assert gateway.models == [ours.engine.info.model]
        assert gateway.gateway.router.fleet.catalog.models() is not before_change
        assert gateway.service.served(ours.engine.info.model).grammars is grammars


async def test_a_gateway_with_text_upstreams_alone_needs_no_tokenizer(folder: Path) -> None:
    async with texts_peer() as texts, RunningGateway(texts.url) as gateway:
        assert gateway.models == [TEXTS]
        body = {"messages": [{"role": "user", "content": "hi"}], "n": 3}
        answer = await gateway.http.post("/v1/chat/completions", json=body)
        assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2]
        refused = await gateway.http.post("/tokenize", json={"prompt": "hi"})
        assert_error(refused, status=400, code="unsupported_model")


async def test_a_vllm_server_is_asked_in_texts_if_named_as_openai(folder: Path) -> None:
    """A server of ours may be asked so too: its own templates, limits and keys hold."""
    async with Running(folder) as ours, RunningGateway(f"{address(ours)},openai") as gateway:
        ours.engine.let_run()
        (worker,) = (await gateway.http.get("/status")).json()["workers"]
        assert (worker["id"], worker["kind"]) == (id_of(ours), "openai")
        body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "seed": 3}
        here, there = [await http.post("/v1/chat/completions", json=body) for http in (gateway.http, ours.http)]
        texts = [[choice["message"]["content"] for choice in answer.json()["choices"]] for answer in (here, there)]
        assert texts[0] == texts[1]


async def test_a_text_upstream_that_is_lost_gets_nothing_until_it_is_back(folder: Path) -> None:
    async with texts_peer() as texts, RunningGateway(texts.url) as gateway:
        id = texts.url.removeprefix("http://")
        texts.manners.models = ()
        await gateway.until_state(id, WorkerState.DEAD)
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert (await gateway.http.post("/v1/chat/completions", json=body)).status_code == 503
        texts.manners.models = ({"id": TEXTS},)
        await gateway.until_state(id, WorkerState.READY)
        assert (await gateway.http.post("/v1/chat/completions", json=body)).status_code == 200


async def test_a_text_upstream_that_leaves_during_a_probe_is_asked_no_more(folder: Path) -> None:
    async with texts_peer() as texts, FakeVLLM() as vllm, gateway_to(folder, vllm) as gateway:
        texts.shut()
        id = texts.url.removeprefix("http://")
        await gateway.http.post("/workers", json={"url": texts.url}, headers=ADMIN)
        await texts.arrived.acquire()
        await gateway.http.delete(f"/workers/{id}", params={"drain_timeout": 0}, headers=ADMIN)
        await gateway.until_state(id, None)
        async with asyncio.timeout(PROBE_S / 2):
            await texts.until_idle()
