"""One gateway in front of servers of every kind, with several models."""

from pathlib import Path

import pytest

from motet.deploy.gateway_models import TokenizerRules
from motet.engine import WorkerState
from motet.engines.vllm.report import scrape_of
from tests.clock import turn
from tests.deploy.gateways import ADMIN, RunningGateway, address, id_of
from tests.deploy.running import Running
from tests.error_response import assert_error
from tests.peers.fake_openai import FakeOpenAI
from tests.peers.fake_vllm import MODEL, FakeVLLM
from tests.peers.openai_script import Behaviour

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

OURS, TEXTS = "tiny", "texts"
TURNS = 1000
"""Turns of the event loop within which a cancelled request has ended on both sides. Their time is far below the time
limit of a probe."""


def texts_peer() -> FakeOpenAI:
    return FakeOpenAI(Behaviour(models=({"id": TEXTS, "max_model_len": 99},)))


def gateway_to(folder: Path, *workers: Running | FakeVLLM | FakeOpenAI) -> RunningGateway:
    urls = [worker if isinstance(worker, Running) else worker.url for worker in workers]
    return RunningGateway(*urls, tokenizers=TokenizerRules({MODEL: folder}))


async def test_every_model_of_every_kind_is_listed_and_answers(folder: Path) -> None:
    async with (
        Running(folder) as motet,
        FakeVLLM(adapters=("poet",)) as vllm,
        texts_peer() as texts,
        gateway_to(folder, motet, vllm, texts) as gateway,
    ):
        motet.engine.let_run()
        name = motet.engine.info.model
        assert sorted(gateway.models) == sorted([name, MODEL, "poet", TEXTS])
        listed = (await gateway.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == gateway.models
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


async def test_a_motet_server_with_vllms_metrics_is_detected_as_a_motet_server(folder: Path) -> None:
    async with Running(folder, metric_prefix="vllm") as motet, gateway_to(folder, motet) as gateway:
        scrape_of((await motet.http.get("/metrics")).content)  # raises unless it could be taken for a vLLM server
        (worker,) = (await gateway.http.get("/status")).json()["workers"]
        assert (worker["kind"], worker["state"]) == ("motet", "ready")


async def test_a_model_is_known_while_its_last_worker_is_away_until_that_leaves(folder: Path) -> None:
    async with FakeVLLM() as vllm, texts_peer() as texts, gateway_to(folder, vllm, texts) as gateway:
        id = vllm.url.removeprefix("http://")
        request_body = {"model": MODEL, "prompt": "hi", "max_tokens": 2}
        vllm.switches.healthy = False
        await gateway.until_state(id, WorkerState.DEAD)
        away = await gateway.http.post("/v1/completions", json=request_body)
        assert_error(away, status=503, code="no_worker")
        await gateway.http.delete(f"/workers/{id}", headers=ADMIN)
        await gateway.until_state(id, None)
        gone = await gateway.http.post("/v1/completions", json=request_body)
        assert_error(gone, status=404, code="model_not_found")


async def test_a_model_keeps_its_compiled_grammars_while_other_models_join_and_leave(folder: Path) -> None:
    """Regression: each change of the fleet made every model again, with the vocabulary of its grammars."""
    async with Running(folder) as motet, texts_peer() as texts, gateway_to(folder, motet, texts) as gateway:
        served = gateway.service.served(motet.engine.info.model)
        before_change, grammars = gateway.gateway.router.fleet.catalog.models(), served.grammars
        await gateway.http.delete(f"/workers/{texts.url.removeprefix('http://')}", headers=ADMIN)
        await gateway.until_state(texts.url.removeprefix("http://"), None)
        assert gateway.models == [motet.engine.info.model]
        assert gateway.gateway.router.fleet.catalog.models() is not before_change
        assert gateway.service.served(motet.engine.info.model).grammars is grammars


async def test_a_gateway_with_text_upstreams_alone_needs_no_tokenizer(folder: Path) -> None:
    async with texts_peer() as texts, RunningGateway(texts.url) as gateway:
        assert gateway.models == [TEXTS]
        body = {"messages": [{"role": "user", "content": "hi"}], "n": 3}
        answer = await gateway.http.post("/v1/chat/completions", json=body)
        assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2]
        refused = await gateway.http.post("/tokenize", json={"prompt": "hi"})
        assert_error(refused, status=400, code="unsupported_model")


async def test_a_motet_server_is_used_as_a_text_upstream_if_named_as_openai(folder: Path) -> None:
    """The templates, limits and keys of the Motet server apply then."""
    async with Running(folder) as motet, RunningGateway(f"{address(motet)},openai") as gateway:
        motet.engine.let_run()
        (worker,) = (await gateway.http.get("/status")).json()["workers"]
        assert (worker["id"], worker["kind"]) == (id_of(motet), "openai")
        body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "seed": 3}
        here, there = [await http.post("/v1/chat/completions", json=body) for http in (gateway.http, motet.http)]
        texts = [[choice["message"]["content"] for choice in answer.json()["choices"]] for answer in (here, there)]
        assert texts[0] == texts[1]


async def test_a_text_upstream_that_is_lost_gets_nothing_until_it_is_back(folder: Path) -> None:
    async with texts_peer() as texts, RunningGateway(texts.url) as gateway:
        id = texts.url.removeprefix("http://")
        texts.behaviour.models = ()
        await gateway.until_state(id, WorkerState.DEAD)
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert (await gateway.http.post("/v1/chat/completions", json=body)).status_code == 503
        texts.behaviour.models = ({"id": TEXTS},)
        await gateway.until_state(id, WorkerState.READY)
        assert (await gateway.http.post("/v1/chat/completions", json=body)).status_code == 200


async def test_a_text_upstream_that_leaves_during_a_probe_gets_no_more_requests(folder: Path) -> None:
    async with texts_peer() as texts, FakeVLLM() as vllm, gateway_to(folder, vllm) as gateway:
        texts.close_gate()
        id = texts.url.removeprefix("http://")
        await gateway.http.post("/workers", json={"url": texts.url}, headers=ADMIN)
        await texts.arrived.acquire()
        await gateway.http.delete(f"/workers/{id}", params={"drain_timeout": 0}, headers=ADMIN)
        await gateway.until_state(id, None)
        for _ in range(TURNS):
            await turn()
        assert texts.running == 0
