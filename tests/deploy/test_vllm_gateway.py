"""A gateway with fake vLLM servers on real sockets: the answers to clients, and the requests to the servers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from motet.deploy.gateway_models import TokenizerRules
from motet.engine import WorkerState
from tests.deploy.gateways import RunningGateway, failure_without_workers, plan_of
from tests.error_response import assert_error
from tests.patience import PATIENCE_S
from tests.peers.fake_vllm import MODEL, FakeVLLM
from tests.peers.vllm_tickets import Network
from tests.peers.vllm_tokens import Kind, expected_tokens

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PROMPT = list(range(10, 50))
TOKENS = 12


def body(n: int, **sampling: object) -> dict[str, object]:
    drawing = {"n": n, "max_tokens": TOKENS, "ignore_eos": True, **sampling}
    return {"model": MODEL, "token_ids": PROMPT, "sampling_params": drawing}


async def generated(gateway: RunningGateway, n: int, **sampling: object) -> list[list[int]]:
    """Returns the token ids of a complete answer, by choice."""
    response = await gateway.http.post("/inference/v1/generate", json=body(n, **sampling))
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(n))
    assert response.json()["usage"]["prompt_tokens"] == len(PROMPT)
    return [choice["token_ids"] for choice in choices]


def seeded(n: int, seed: int) -> list[list[int]]:
    """Returns the tokens that each choice would have alone."""
    return [expected_tokens(PROMPT, TOKENS, Kind(seed=seed + index)) for index in range(n)]


def gateway_of(folder: Path, *servers: FakeVLLM | str, **gateway: Any) -> RunningGateway:
    workers = [server if isinstance(server, str) else server.url for server in servers]
    return RunningGateway(*workers, tokenizers=TokenizerRules({}, others=folder), gateway=gateway)


@contextlib.asynccontextmanager
async def pair_of(folder: Path, **gateway: Any) -> AsyncIterator[tuple[Network, FakeVLLM, FakeVLLM, RunningGateway]]:
    """A prefill and a decode server, which exchange KV, and their gateway."""
    network = Network()
    async with (
        FakeVLLM(network=network) as prefill,
        FakeVLLM(network=network) as decode,
        gateway_of(folder, f"{prefill.url},prefill", f"{decode.url},decode", **gateway) as running,
    ):
        yield network, prefill, decode, running


async def test_servers_get_the_trace_of_the_client_with_each_request(folder: Path) -> None:
    trace, sent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with pair_of(folder) as (network, prefill, decode, gateway):
        await until_connected(network, decode)
        before = [len(server.request_names) for server in (prefill, decode)]
        headers = {"traceparent": f"00-{trace}-{sent}-01"}
        response = await gateway.http.post("/inference/v1/generate", json=body(2, seed=1), headers=headers)
        assert response.status_code == 200, response.text
        for server, known in zip((prefill, decode), before, strict=True):
            assert {one.traceparent for one in server.request_names[known:]} == {headers["traceparent"]}


async def until_connected(network: Network, decode: FakeVLLM) -> None:
    """A pair is connected by one transfer, which can end after the gateway's start if its first probe timed out."""
    await decode.until(lambda: network.transfers == 1 and decode.open == 0)


@pytest.mark.parametrize("scale_out", [False, True], ids=["completions", "generate"])
async def test_the_choices_of_a_group_equal_single_requests(folder: Path, scale_out: bool) -> None:
    async with FakeVLLM() as server:
        server.switches.scale_out = scale_out
        async with gateway_of(folder, server) as gateway:
            assert gateway.models == [MODEL]
            assert await generated(gateway, 3, seed=5) == seeded(3, 5)
            assert await generated(gateway, 3, temperature=0) == [expected_tokens(PROMPT, TOKENS)] * 3
            assert len({tuple(tokens) for tokens in await generated(gateway, 4)}) == 4
        server.check()


@pytest.mark.parametrize("scale_out", [False, True], ids=["completions", "generate"])
async def test_fields_that_a_client_omits_have_the_values_of_the_server(folder: Path, scale_out: bool) -> None:
    defaults: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    async with FakeVLLM() as server:
        server.switches.scale_out, server.switches.defaults = scale_out, defaults
        async with gateway_of(folder, server) as gateway:
            (card,) = (await gateway.http.get("/v1/models")).json()["data"]
            assert card["default_sampling_params"] == (defaults if scale_out else None)
            for given in ({}, {"temperature": 1, "top_k": -1}):
                assert (await gateway.http.post("/v1/chat/completions", json={**chat, **given})).status_code == 200
        bodies: list[Any] = [request.body.get("sampling_params", request.body) for request in server.requests[-2:]]
        sent = [{name: body[name] for name in defaults if name in body} for body in bodies]
        # On /v1/completions the server uses its own values for fields that it does not get.
        omitted = defaults if scale_out else {}
        assert sent == [omitted, {**omitted, "temperature": 1.0, "top_k": 0}]


async def test_separate_prefill_and_decode_take_one_ticket_and_one_transfer_per_group(folder: Path) -> None:
    network = Network()
    async with FakeVLLM(network=network) as prefill, FakeVLLM(network=network) as decode:
        async with gateway_of(folder, f"{prefill.url},prefill", decode, role_of=(f"{decode.url}=decode",)) as gateway:
            await until_connected(network, decode)
            for transfers, n in enumerate((1, 3, 8), start=2):
                assert await generated(gateway, n, seed=5) == seeded(n, 5)
                assert network.transfers == transfers
        for server in (prefill, decode):
            server.check()


async def test_both_servers_get_the_clients_ids_of_request_and_session(folder: Path) -> None:
    names = {"x-request-id": "client-1", "x-session-id": "talk"}
    async with pair_of(folder) as (network, prefill, decode, gateway):
        await until_connected(network, decode)
        for server in (prefill, decode):
            server.request_names.clear()
        await gateway.http.post("/inference/v1/generate", json=body(1), headers=names)
        for server in (prefill, decode):
            (ids,) = server.request_names
            assert str(ids.request_id).startswith("client-1-")
            assert ids.session_id == "talk"


async def test_an_unused_ticket_is_released_under_the_clients_request_id(folder: Path) -> None:
    async with pair_of(folder) as (network, _, decode, gateway):
        await until_connected(network, decode)
        decode.switches.too_busy = 1  # decode refuses the request at first, so the ticket is released
        decode.request_names.clear()
        answer = await gateway.http.post("/inference/v1/generate", json=body(1), headers={"x-request-id": "client-2"})
        assert answer.status_code == 200
        await decode.until(lambda: not network.pinned)
        released = [names.request_id for names in decode.request_names if "release" in str(names.request_id)]
        assert {str(name).rpartition("-release-")[0] for name in released} == {"client-2"}


async def test_a_server_with_a_connector_but_no_role_decodes_what_another_prefilled(folder: Path) -> None:
    network = Network()
    async with FakeVLLM(network=network) as prefill, FakeVLLM(network=network) as other:
        async with gateway_of(folder, f"{prefill.url},prefill", other) as gateway:
            await until_connected(network, other)
            assert await generated(gateway, 3, seed=5) == seeded(3, 5)
        assert network.transfers == 2


async def test_a_decode_server_that_dies_during_an_answer_is_not_noticed(folder: Path) -> None:
    """The choices are greedy: a choice that is requested again with its output tokens continues in the same way."""
    network = Network()
    async with FakeVLLM(network=network) as a, FakeVLLM(network=network) as b:
        async with gateway_of(folder, a, b) as gateway:
            a.hold()
            b.hold()
            answering = asyncio.ensure_future(generated(gateway, 3, temperature=0))
            first, other = await generating_server(a, b)
            first.step(5)
            other.run()
            await first.until(lambda: first.counters.generated_tokens >= 5)
            await first.kill()
            assert await answering == [expected_tokens(PROMPT, TOKENS)] * 3
            migrations = (await gateway.http.get("/status")).json()["totals"]["migrations"]
            assert migrations == 1
        other.check()


async def generating_server(*servers: FakeVLLM) -> tuple[FakeVLLM, FakeVLLM]:
    """Returns the one of two servers that has a request, and the other one."""
    waits = {asyncio.ensure_future(until_requested(server)): server for server in servers}
    done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in pending:
        wait.cancel()
    first = waits[done.pop()]
    return first, next(server for server in servers if server is not first)


async def until_requested(server: FakeVLLM) -> None:
    await server.until(lambda: server.open > 0)


@pytest.mark.parametrize(
    ("failure", "reason", "timeout_s"), [("pull_fails", "failed", PATIENCE_S), ("pull_hangs", "late", 0.5)]
)
async def test_kv_that_does_not_arrive_is_computed_on_decode_and_counted(
    folder: Path, failure: str, reason: str, timeout_s: float
) -> None:
    async with pair_of(folder, leader_timeout_s=timeout_s) as (network, _, decode, gateway):
        await until_connected(network, decode)
        setattr(decode.switches, failure, True)
        assert await generated(gateway, 3, seed=5) == seeded(3, 5)
        metrics = (await gateway.http.get("/metrics")).text
        assert f'motet:pull_fallbacks_total{{model_name="{MODEL}",reason="{reason}"}} 1.0' in metrics


async def test_a_client_that_leaves_before_decode_has_its_ticket_frees_the_prompt_at_once(folder: Path) -> None:
    async with pair_of(folder) as (network, _, decode, gateway):
        await until_connected(network, decode)
        decode.switches.pull_hangs = True
        decode.hold()
        answering = asyncio.ensure_future(gateway.http.post("/inference/v1/generate", json=body(8)))
        await decode.until(lambda: network.pulling == 1)
        answering.cancel()
        await decode.until(lambda: not (network.pinned or decode.open))
    assert network.faults == []


async def test_adapters_are_models_of_the_workers_that_have_them(folder: Path) -> None:
    async with (
        FakeVLLM() as plain,
        FakeVLLM(adapters=("poet", "judge")) as tuned,
        gateway_of(folder, plain, tuned) as gateway,
    ):
        cards = (await gateway.http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            (MODEL, None),
            ("poet", MODEL),
            ("judge", MODEL),
        ]
        for _ in range(4):
            answer = await gateway.http.post("/inference/v1/generate", json=body(1) | {"model": "poet"})
            assert answer.status_code == 200, answer.text
        assert [request.model for request in tuned.requests if len(request.prompt) == len(PROMPT)] == ["poet"] * 4
        unknown = await gateway.http.post("/inference/v1/generate", json=body(1) | {"model": "nobody"})
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "model_not_found"
        assert all(f"`{name}`" in unknown.json()["error"]["message"] for name in (MODEL, "poet", "judge"))
        unnamed = await gateway.http.post(
            "/inference/v1/generate", json={name: value for name, value in body(1).items() if name != "model"}
        )
        assert unnamed.status_code == 200, unnamed.text
        last = [*plain.requests, *tuned.requests]
        assert {request.model for request in last} == {MODEL, "poet"}


async def test_a_server_that_has_restarted_is_used_again(folder: Path) -> None:
    async with FakeVLLM() as server, gateway_of(folder, server) as gateway:
        await server.kill()
        await gateway.until_state(server.url.removeprefix("http://"), WorkerState.DEAD)
        await server.start()
        await gateway.until_state(server.url.removeprefix("http://"), WorkerState.READY)
        assert await generated(gateway, 2, seed=1) == seeded(2, 1)


async def test_a_worker_whose_engine_died_gets_nothing_until_it_is_back(folder: Path) -> None:
    async with FakeVLLM() as server, gateway_of(folder, server) as gateway:
        server.switches.healthy = False
        await gateway.until_state(server.url.removeprefix("http://"), WorkerState.DEAD)
        refused = await gateway.http.post("/inference/v1/generate", json=body(1))
        assert_error(refused, status=503, code="no_worker")
        server.switches.healthy = True
        await gateway.until_state(server.url.removeprefix("http://"), WorkerState.READY)
        assert await generated(gateway, 1, seed=1) == seeded(1, 1)


async def test_a_worker_with_another_tokenizer_than_the_gateway_is_not_used(folder: Path) -> None:
    async with FakeVLLM() as server:
        server.switches.tokens_of_text = [1, 2, 3]
        plan = plan_of(server.url, tokenizers=TokenizerRules({}, others=folder))
        assert f"has another tokenizer for {MODEL} than this gateway" in await failure_without_workers(plan)


async def test_each_worker_is_sent_its_own_key(folder: Path) -> None:
    async with FakeVLLM() as one, FakeVLLM(model="other") as two:
        one.switches.api_key, two.switches.api_key = "first", "second"
        async with gateway_of(folder, one, two, worker_api_key="first", key_of=(f"{two.url}=second",)) as gateway:
            assert set(gateway.models) == {MODEL, "other"}
            assert await generated(gateway, 2, seed=1) == seeded(2, 1)


async def test_a_worker_that_requires_another_key_is_shown_with_that_reason(folder: Path) -> None:
    async with FakeVLLM() as right, FakeVLLM() as wrong:
        wrong.switches.api_key = "secret"
        async with gateway_of(folder, right, wrong) as gateway:
            id = wrong.url.removeprefix("http://")
            await gateway.until_state(id, WorkerState.DEAD)
            (_, worker) = (await gateway.http.get("/status")).json()["workers"]
            assert "answered 401" in worker["note"]


async def until_listed(gateway: RunningGateway, *names: str) -> None:
    fleet = gateway.gateway.router.fleet
    while tuple(fleet.catalog.models()) != names:
        await fleet.changes.wait()


async def test_an_adapter_loaded_at_run_time_is_a_model_until_it_is_unloaded(
    folder: Path,
) -> None:
    async with FakeVLLM() as server, gateway_of(folder, server) as gateway:
        server.adapters = ("poet",)
        await until_listed(gateway, MODEL, "poet")
        listed = (await gateway.http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in listed] == [(MODEL, None), ("poet", MODEL)]
        answer = await generated_by_poet(gateway)
        assert answer.status_code == 200, answer.text
        server.adapters = ()
        await until_listed(gateway, MODEL)
        gone = await generated_by_poet(gateway)
        assert_error(gone, status=404, code="model_not_found")


async def test_an_adapter_that_one_server_has_just_lost_is_requested_from_another(folder: Path) -> None:
    """Regression: the gateway did not know of the loss so far, and answered that the model does not exist."""
    async with (
        FakeVLLM(adapters=("poet",)) as one,
        FakeVLLM(adapters=("poet",)) as other,
        gateway_of(folder, one, other) as gateway,
    ):
        one.requests.clear()
        one.switches.lost = ("poet",)
        answers = [await generated_by_poet(gateway) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert not one.requests


async def test_an_adapter_that_no_server_has_any_more_is_refused_and_then_unknown(folder: Path) -> None:
    async with FakeVLLM(adapters=("poet",)) as server, gateway_of(folder, server) as gateway:
        server.switches.lost = ("poet",)
        refused = await generated_by_poet(gateway)
        assert refused.status_code == 503
        assert "no longer has the model" in refused.json()["error"]["message"]
        server.adapters = ()
        await until_listed(gateway, MODEL)
        assert (await generated_by_poet(gateway)).status_code == 404


async def generated_by_poet(gateway: RunningGateway) -> httpx.Response:
    return await gateway.http.post("/inference/v1/generate", json=body(1) | {"model": "poet"})


async def test_a_server_that_does_not_report_its_blocks_gets_several_groups_at_once(folder: Path) -> None:
    """If it counted as having no blocks, a second group would seem not to fit."""
    async with FakeVLLM() as server:
        server.switches.reports_blocks = False
        async with gateway_of(folder, server) as gateway:
            server.hold()
            answers = [asyncio.ensure_future(generated(gateway, 3, seed=seed)) for seed in (5, 9)]
            await server.until(lambda: server.open == 2)
            server.run()
            assert [await answer for answer in answers] == [seeded(3, 5), seeded(3, 9)]
