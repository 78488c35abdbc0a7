"""The defaults of sampling fields on every route: they apply where a request omits a field, and nowhere else."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from motet.api.http.dialect import MODELS
from motet.sampling_defaults import DefaultRules
from motet.types import SamplingParams
from tests.api.serving import PROMPT, Served, Serving, WatchedEngine
from tests.api.two_models import PLAIN, TURNED, Tokenizers, served_as

pytestmark = pytest.mark.anyio

DEFAULTS: dict[str, int | float] = {
    "temperature": 0.6,
    "top_p": 0.95,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "max_tokens": 30,
}
NEUTRAL = {"temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
MESSAGES = [{"role": "user", "content": "hi"}]
CHATS: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "n": 2},
    "/v1/completions": {"prompt": [PROMPT, PROMPT]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
}
TOKEN_ROUTES: Mapping[str, dict[str, Any]] = {
    "/inference/v1/generate": {"token_ids": PROMPT},
    "/generate": {"input_ids": PROMPT},
}


@pytest.fixture
async def served(serve: Serving) -> Served:
    return await serve(engine=engine_with(DEFAULTS))


def engine_with(defaults: dict[str, int | float] | None) -> WatchedEngine:
    engine = WatchedEngine()
    engine.info = replace(engine.info, default_sampling_params=defaults)
    return engine


async def sampling(served: Served, path: str, body: Mapping[str, object]) -> SamplingParams:
    """Returns the parameters that the engine gets, without the maximum number of tokens."""
    response = await served.http.post(path, json=body)
    assert response.status_code == 200, response.text
    last = served.engine.requests[-1]
    assert last.unset_fields == ()
    return replace(last.sampling, max_tokens=1)


async def max_tokens(served: Served, path: str, **body: object) -> int:
    assert (await served.http.post(path, json=body)).status_code == 200
    return served.engine.requests[-1].sampling.max_tokens


@pytest.mark.parametrize("path", CHATS)
async def test_a_request_that_omits_the_fields_equals_one_that_has_the_defaults(served: Served, path: str) -> None:
    body, given = CHATS[path], {name: value for name, value in DEFAULTS.items() if name != "max_tokens"}
    expected = await sampling(served, path, {**body, **given})
    assert expected == SamplingParams(max_tokens=1, **given)  # type: ignore[arg-type]
    assert await sampling(served, path, body) == expected
    assert await sampling(served, path, {**body, **dict.fromkeys(given)}) == expected


@pytest.mark.parametrize("path", CHATS)
async def test_a_neutral_value_in_a_request_replaces_the_default(served: Served, path: str) -> None:
    assert await sampling(served, path, {**CHATS[path], **NEUTRAL}) == SamplingParams(max_tokens=1)
    one = await sampling(served, path, {**CHATS[path], "temperature": 1})
    assert (one.temperature, one.top_k) == (1.0, 20)


@pytest.mark.parametrize("path", TOKEN_ROUTES)
async def test_routes_of_token_ids_are_neutral_as_in_vllm_and_sglang(served: Served, path: str) -> None:
    assert await sampling(served, path, TOKEN_ROUTES[path]) == SamplingParams(max_tokens=1)


async def test_a_rendered_chat_has_the_defaults_of_the_chat(served: Served) -> None:
    chat = {"messages": MESSAGES, "seed": 3}
    rendered = (await served.http.post("/v1/chat/completions/render", json=chat)).json()
    expected = await sampling(served, "/v1/chat/completions", chat)
    assert await sampling(served, "/inference/v1/generate", rendered) == expected
    assert rendered["sampling_params"]["max_tokens"] == 30


async def test_the_default_of_max_tokens_is_a_limit_only_where_a_request_has_none(served: Served) -> None:
    chat, message = "/v1/chat/completions", {"messages": MESSAGES}
    assert await max_tokens(served, chat, **message) == 30
    assert await max_tokens(served, chat, **message, max_tokens=31) == 31
    assert await max_tokens(served, chat, **message, max_completion_tokens=5) == 5
    assert await max_tokens(served, chat, **message, min_tokens=40) == 40
    assert await max_tokens(served, "/v1/responses", input="hi") == 30
    assert await max_tokens(served, "/inference/v1/generate", token_ids=PROMPT) == 30
    # As in OpenAI's API and in SGLang, whatever the model's default is.
    assert await max_tokens(served, "/v1/completions", prompt=PROMPT) == 16
    assert await max_tokens(served, "/generate", input_ids=PROMPT) == 128


async def test_a_long_prompt_leaves_fewer_tokens_than_the_default(served: Served) -> None:
    length = served.engine.info.max_model_len - 10
    assert await max_tokens(served, "/inference/v1/generate", token_ids=[5] * length) == 10


async def test_a_response_repeats_the_values_that_were_used(served: Served) -> None:
    response = (await served.http.post("/v1/responses", json={"input": "hi", "top_p": 0.5})).json()
    assert (response["temperature"], response["top_p"]) == (0.6, 0.5)


async def test_dynamos_greedy_sampling_replaces_the_default(served: Served) -> None:
    greedy = {"messages": MESSAGES, "nvext": {"greed_sampling": True, "top_k": 3}}
    params = await sampling(served, "/v1/chat/completions", greedy)
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 3, 0.95)


async def test_each_model_has_its_own_defaults_and_lists_them(serve: Serving, tokenizers: Tokenizers) -> None:
    engines = engine_with({"temperature": 0.5}), engine_with(None)
    rules = DefaultRules(override={"top_p": 0.5})
    models = {
        PLAIN: served_as(PLAIN, engines[0], tokenizers[0]),
        TURNED: served_as(TURNED, engines[1], tokenizers[1]),
        "overridden": served_as("overridden", engines[1], tokenizers[1], default_rules=rules),
    }
    server = await serve.several(lambda: models, *engines)
    listed = {card["id"]: card["default_sampling_params"] for card in (await server.http.get(MODELS)).json()["data"]}
    assert listed == {PLAIN: {"temperature": 0.5}, TURNED: None, "overridden": {"top_p": 0.5}}
    for model in models:
        await server.chat(model=model, top_k=1)
    (plain,), (turned, overridden) = (engine.requests for engine in engines)
    assert (plain.sampling.temperature, plain.unset_fields) == (0.5, ())
    unset = ("min_p", "repetition_penalty", "temperature", "top_p")
    assert (turned.sampling.temperature, turned.unset_fields) == (1.0, unset)
    assert (overridden.sampling.top_p, overridden.unset_fields) == (0.5, unset[:-1])
