"""A vLLM server over a real socket: its reports, and the route of its requests."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from motet.engine import WorkerState
from motet.engine_info import EngineKind, ModelCard
from motet.engines.vllm.requests import Dialect
from motet.engines.vllm.vllm_server import VLLMServer
from motet.errors import EngineDiedError, EngineError, EngineSilentError, OtherServerError
from motet.ids import ModelName
from tests.engines.vllm.scripted_vllm import canned, vllm_server_at
from tests.engines.vllm.test_report import TEXT
from tests.peers.fake_vllm import FakeVLLM
from tests.peers.vllm_switches import Switches

pytestmark = pytest.mark.anyio

MODELS = b'{"data":[{"id":"m","root":"org/m","parent":null,"max_model_len":100}]}'
OK = {
    "/health": (200, b""),
    "/metrics": (200, TEXT),
    "/v1/models": (200, MODELS),
    "/version": (200, b'{"version":"0.9.0"}'),
    "/inference/v1/generate": (400, b"{}"),
}
"""The answers of a server without block events, as older ones are."""


@pytest.fixture
async def fake() -> AsyncIterator[FakeVLLM]:
    async with FakeVLLM() as fake:
        yield fake
        fake.check()


async def test_a_server_reports_like_motets_own_servers(fake: FakeVLLM) -> None:
    async with vllm_server_at(f"{fake.url}/v1/") as server:
        report = await server.report()
    info = report.info
    assert (report.state, report.version, report.models) == (WorkerState.READY, "0.32.0", ())
    assert (info.kind, info.model, info.max_model_len) == (EngineKind.VLLM, "smollm2", 4096)
    assert (info.block_size, info.num_blocks) == (16, 1000)
    assert info.transfer is not None
    assert (info.transfer.engine_id, info.transfer.port) == (report.engine_id, fake.port)
    assert report.stats is not None
    assert (server.url, server.root) == (fake.url, "/models/smollm2")


async def test_a_server_that_was_started_again_has_another_id(fake: FakeVLLM) -> None:
    async with vllm_server_at(fake.url) as server:
        first = await server.report()
        assert (await server.report()).engine_id == first.engine_id
        await fake.kill()
        with pytest.raises(EngineDiedError):
            await server.report()
        await fake.start()
        second = await server.report()
        assert second.engine_id != first.engine_id
        assert (await server.report()).engine_id == second.engine_id


async def test_a_server_without_a_time_of_start_has_another_id_after_it_was_lost() -> None:
    timeless = TEXT.replace(b"process_start_time_seconds 1", b"other 1")
    async with canned({**OK, "/metrics": (200, timeless)}) as far, vllm_server_at(far.url) as server:
        first = await server.report()
        assert (await server.report()).engine_id == first.engine_id
        far.answers["/health"] = (503, b"")
        with pytest.raises(EngineDiedError):
            await server.report()
        far.answers["/health"] = (200, b"")
        assert (await server.report()).engine_id != first.engine_id


async def test_adapters_that_are_loaded_later_are_reported(fake: FakeVLLM) -> None:
    async with vllm_server_at(fake.url) as server:
        assert (await server.report()).models == ()
        fake.adapters = ("sql",)
        assert (await server.report()).models == (
            ModelCard(name=ModelName("sql"), root="/adapters/sql", parent=ModelName("smollm2"), max_model_len=4096),
        )


@pytest.mark.parametrize(("scale_out", "dialect"), [(True, Dialect.GENERATE), (False, Dialect.COMPLETIONS)])
async def test_a_server_gets_requests_on_the_route_that_it_has(scale_out: bool, dialect: Dialect) -> None:
    async with FakeVLLM(switches=Switches(scale_out=scale_out)) as fake, vllm_server_at(fake.url) as server:
        await server.report()
        assert server.dialect is dialect


@pytest.mark.parametrize(
    ("rendered", "reported"),
    [
        (None, None),
        ({}, {}),
        ({"temperature": 1.0, "top_k": 0, "repetition_penalty": None}, {}),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "seed": 3}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"max_tokens": 100}, {"max_tokens": 100}),
        ({"temperature": "hot"}, None),
    ],
    ids=str,
)
async def test_a_server_with_the_generate_route_reports_the_defaults_of_rendered_requests(
    rendered: dict[str, object] | None, reported: dict[str, object] | None
) -> None:
    async with (
        FakeVLLM(switches=Switches(scale_out=True, defaults=rendered)) as fake,
        vllm_server_at(fake.url) as server,
    ):
        assert (await server.report()).info.default_sampling_params == reported


async def test_a_server_that_applies_its_defaults_itself_reports_none(fake: FakeVLLM) -> None:
    fake.switches.defaults = {"temperature": 0.6}
    async with vllm_server_at(fake.url) as server:
        assert (await server.report()).info.default_sampling_params is None


async def test_a_server_is_probed_once_after_each_start(fake: FakeVLLM) -> None:
    async with vllm_server_at(fake.url) as server:
        await server.report()
        await server.report()
        assert len(fake.requests) == 1
        await fake.kill()
        fake.switches.scale_out = True
        await fake.start()
        await server.report()
        assert (len(fake.requests), server.dialect) == (1, Dialect.GENERATE)


async def test_a_server_that_sends_no_token_ids_is_of_another_kind() -> None:
    async with FakeVLLM(switches=Switches(token_ids=False)) as fake, vllm_server_at(fake.url) as server:
        with pytest.raises(OtherServerError, match="sends no token ids"):
            await server.report()


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/health", (404, b"")),
        ("/health", (401, b"")),
        ("/health", (302, b"")),
        ("/metrics", (404, b"")),
        ("/metrics", (200, b"llamacpp:tokens 3\n")),
        ("/v1/models", (404, b"")),
        ("/v1/models", (400, b'{"error":{"message":"no"}}')),
        ("/v1/models", (200, b'{"data":[]}')),
        ("/version", (404, b"")),
    ],
)
async def test_a_server_that_lacks_a_route_of_vllm_is_of_another_kind(path: str, answer: tuple[int, bytes]) -> None:
    async with canned({**OK, path: answer}) as far, vllm_server_at(far.url) as server:
        with pytest.raises(OtherServerError, match=far.url):
            await server.report()


async def test_an_older_server_reports_no_event_sources() -> None:
    async with canned(OK) as far, vllm_server_at(far.url) as server:
        report = await server.report()
    assert (report.version, report.block_events) == ("0.9.0", None)


async def test_block_events_are_followed_at_the_host_of_the_server() -> None:
    sources = {"0": {"endpoint": "tcp://*:9191", "replay_endpoint": "tcp://*:9192", "topic": ""}}
    async with FakeVLLM(switches=Switches(event_sources=dict(sources))) as fake, vllm_server_at(fake.url) as server:
        report = await server.report()
    assert (report.block_events, report.block_replay) == ("tcp://127.0.0.1:9191", "tcp://127.0.0.1:9192")


async def test_the_error_for_an_unknown_key_says_what_to_do() -> None:
    async with FakeVLLM(switches=Switches(api_key="right")) as fake:
        async with vllm_server_at(fake.url, api_key="right") as server:
            await server.report()
        for key in (None, "wrong"):
            async with vllm_server_at(fake.url, api_key=key) as server:
                with pytest.raises(EngineError, match=r"401: Unauthorized\. Give the gateway a key") as caught:
                    await server.report()
                assert type(caught.value) is EngineError


async def test_a_key_that_only_generate_refuses_is_an_error() -> None:
    async with canned({**OK, "/inference/v1/generate": (401, b"")}) as far, vllm_server_at(far.url) as server:
        with pytest.raises(EngineError, match=r"answered 401\. Give the gateway a key"):
            await server.report()


async def test_a_server_that_is_not_healthy_is_dead(fake: FakeVLLM) -> None:
    fake.switches.healthy = False
    async with vllm_server_at(fake.url) as server:
        with pytest.raises(EngineDiedError) as caught:
            await server.report()
    assert type(caught.value) is EngineDiedError


async def test_a_server_that_hangs_or_is_too_busy_to_answer_is_silent(fake: FakeVLLM) -> None:
    fake.stop()
    async with vllm_server_at(fake.url) as server:
        with pytest.raises(EngineSilentError):
            await server.report(timeout_s=0.05)
    fake.resume()
    async with canned({**OK, "/v1/models": (429, b"")}) as far, vllm_server_at(far.url) as server:
        with pytest.raises(EngineSilentError):
            await server.report()


async def test_an_invalid_url_is_an_error() -> None:
    async with vllm_server_at("no url") as server:
        with pytest.raises(EngineError, match="The URL of the vLLM server no url is not valid"):
            await server.report()


async def test_every_request_has_the_key() -> None:
    async with AsyncExitStack() as stack:
        far = await stack.enter_async_context(canned(OK))
        server: VLLMServer = await stack.enter_async_context(vllm_server_at(far.url, api_key="k"))
        await server.report()
    assert [path for path, _, _ in far.requests] == [
        "/health",
        "/metrics",
        "/v1/models",
        "/version",
        "/kv_event_sources",
        "/inference/v1/generate",
        "/v1/completions/render",
    ]
    assert {headers.get("authorization") for _, headers, _ in far.requests} == {"Bearer k"}
