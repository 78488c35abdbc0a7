"""Several models on one server: each request gets the tokenizer, limits and engine of the model that it names."""

import pytest

from motet.settings.server_config import ServerConfig
from motet.testing.fake_engine import NOWHERE
from motet.transfer.ticket import params_of
from motet.types import Role
from tests.api.engine_requests import group
from tests.api.serving import Served, Serving, chunks
from tests.api.two_models import (
    PLAIN,
    TURNED,
    Tokenizers,
    TwoModels,
    every_route,
    generating_routes,
    post,
    ticket_routes,
)
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio


@pytest.fixture
async def served(serve: Serving, models: TwoModels) -> Served:
    return await serve.several(models, *models.engines)


async def test_a_prompt_becomes_tokens_of_the_named_model(
    served: Served, models: TwoModels, tokenizers: Tokenizers
) -> None:
    for model in (PLAIN, TURNED):
        assert (await served.complete("hello aab", model=model)).status_code == 200
    (plain,), (turned,) = models.plain.requests, models.turned.requests
    assert list(plain.prompt) == tokenizers[0].encode("hello aab", add_special_tokens=True)
    assert list(turned.prompt) == tokenizers[1].encode("hello aab", add_special_tokens=True)
    assert plain.prompt != turned.prompt


async def test_an_answer_is_read_with_the_tokenizer_of_its_model(served: Served) -> None:
    """Makes both engines generate the same tokens."""
    for model, text, fingerprint in ((PLAIN, "ab", "plain-same"), (TURNED, "ba", "turned-same")):
        chat = (await post(served, "/v1/chat/completions", model, logprobs=True)).json()
        assert (chat["model"], chat["system_fingerprint"]) == (model, fingerprint)
        assert chat["choices"][0]["message"]["content"] == text
        assert "".join(entry["token"] for entry in chat["choices"][0]["logprobs"]["content"][:2]) == text
        completion = (await post(served, "/v1/completions", model, echo=True)).json()
        assert (completion["model"], completion["choices"][0]["text"]) == (model, "aab" + text)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_names_its_model_and_has_its_text(served: Served, path: str) -> None:
    for model, text in ((PLAIN, "ab"), (TURNED, "ba")):
        got = chunks(await post(served, path, model, stream=True, n=2))
        assert {chunk["model"] for chunk in got} == {model}
        texts = ["", ""]
        for choice in (choice for chunk in got for choice in chunk["choices"]):
            texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        assert texts == [text, text]


async def test_a_chat_is_rendered_by_the_template_of_its_model(
    served: Served, models: TwoModels, tokenizers: Tokenizers
) -> None:
    for model in (PLAIN, TURNED):
        await post(served, "/v1/chat/completions", model)
    read = [
        tokenizer.decode(engine.requests[0].prompt, skip_special_tokens=False)
        for tokenizer, engine in zip(tokenizers, models.engines, strict=True)
    ]
    assert read == ["<|im_start|>user\naab<|im_end|>\n<|im_start|>assistant\n", "aab"]


async def test_token_ids_reach_the_engine_of_the_named_model(served: Served, models: TwoModels) -> None:
    assert (await post(served, "/inference/v1/generate", TURNED)).status_code == 200
    assert (len(models.plain.requests), len(models.turned.requests)) == (0, 1)
    assert models.turned.requests[0].prompt == (5, 6)


async def test_texts_are_tokenised_for_the_named_model(served: Served, tokenizers: Tokenizers) -> None:
    for model, tokenizer, length in ((PLAIN, tokenizers[0], 4096), (TURNED, tokenizers[1], 64)):
        tokenized = (await post(served, "/tokenize", model, return_token_strs=True)).json()
        assert tokenized["tokens"] == tokenizer.encode("aab", add_special_tokens=True)
        assert (tokenized["token_strs"], tokenized["max_model_len"]) == (["a", "a", "b"], length)
        back = (await post(served, "/detokenize", model, tokens=tokenized["tokens"])).json()
        assert back == {"prompt": "aab"}


async def test_limits_of_length_count_and_vocabulary_are_the_model_s(served: Served) -> None:
    refusals: dict[str, dict[str, object]] = {
        "context_length_exceeded": {"prompt": "x" * 70},
        "integer_above_max_value": {"n": 4},
        "invalid_value": {"logit_bias": {"300": 1}},
    }
    for code, fields in refusals.items():
        assert (await post(served, "/v1/completions", PLAIN, **fields)).status_code == 200
        assert_error(await post(served, "/v1/completions", TURNED, **fields), status=400, code=code)
    for path, field in (("/inference/v1/generate", "token_ids"), ("/detokenize", "tokens")):
        assert (await post(served, path, PLAIN, **{field: [300]})).status_code == 200
        assert (await post(served, path, TURNED, **{field: [300]})).status_code == 400


@every_route
async def test_with_several_models_a_request_must_name_one(served: Served, path: str) -> None:
    for name in (None, ""):
        refused = await post(served, path, name)
        assert_error(refused, status=400, code="missing_required_parameter", param="model")
        assert refused.json()["error"]["message"].endswith(f"Available here: `{PLAIN}`, `{TURNED}`.")


@every_route
async def test_an_empty_name_means_the_only_model(serve: Serving, path: str) -> None:
    served = await serve()
    assert (await post(served, path, "")).status_code == 200


@every_route
async def test_the_error_for_an_unknown_model_lists_the_known_ones(served: Served, path: str) -> None:
    refused = await post(served, path, "gpt")
    message = f"The model `gpt` does not exist or you do not have access to it. Available here: `{PLAIN}`, `{TURNED}`."
    assert_error(refused, status=404, code="model_not_found", param="model", message=message)


@generating_routes
async def test_engines_learn_if_the_seed_was_given_and_choices_can_end_early(
    served: Served, models: TwoModels, path: str
) -> None:
    for fields in ({}, {"seed": 7}, {"stop": "x"}, {"seed": 0, "stop": ["x", "y"]}):
        inside = {"sampling_params": fields} if path == "/inference/v1/generate" else fields
        assert (await post(served, path, PLAIN, **inside)).status_code == 200
    flags = [(request.seeded, request.stops) for request in models.plain.requests]
    assert flags == [(False, False), (True, False), (False, True), (True, True)]


async def test_all_models_share_one_admission_limit(serve: Serving, tokenizers: Tokenizers) -> None:
    models = TwoModels(tokenizers, gated=True)
    config = ServerConfig(served_model_name="", max_waiting_groups=1)
    served = await serve.several(models, *models.engines, config=config)
    request = await models.plain.start_request(post(served, "/v1/completions", PLAIN))
    assert_error(await post(served, "/v1/completions", TURNED), status=503, code="overloaded")
    models.plain.go(3)
    assert (await request).status_code == 200


async def test_each_model_can_be_a_prefill_or_a_decode_server(serve: Serving, tokenizers: Tokenizers) -> None:
    models = TwoModels(tokenizers, roles=(Role.PREFILL, Role.DECODE))
    served = await serve.several(models, *models.engines)
    order = {"do_remote_decode": True}
    made = await post(served, "/v1/completions", PLAIN, kv_transfer_params=order)
    assert made.json()["kv_transfer_params"]["num_tokens"] == 2
    models.plain.leases.held.clear()
    refused = await post(served, "/v1/completions", TURNED, kv_transfer_params=order)
    assert_error(refused, status=400, param="kv_transfer_params")
    ticket = models.turned.leases.grant(group(prompt=(5, 6)), NOWHERE, readers=1, block_size=16)
    taken = await post(served, "/inference/v1/generate", TURNED, kv_transfer_params=params_of(ticket))
    assert taken.status_code == 200
    assert models.turned.requests[-1].ticket == ticket


@ticket_routes
@pytest.mark.parametrize("model", ["gpt", None])
async def test_a_ticket_for_an_unknown_model_is_released(
    serve: Serving, tokenizers: Tokenizers, path: str, model: str | None
) -> None:
    models = TwoModels(tokenizers, roles=(Role.DECODE, Role.DECODE))
    served = await serve.several(models, *models.engines)
    ticket = models.plain.leases.grant(group(prompt=(5, 6)), NOWHERE, readers=1, block_size=16)
    assert (await post(served, path, model, kv_transfer_params=params_of(ticket))).json()["error"]["param"] == "model"
    assert models.plain.released == [ticket]
