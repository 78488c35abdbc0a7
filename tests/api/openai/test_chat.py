"""Chat completions, through the official client if it can send the request, otherwise over raw HTTP."""

from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessageParam

from motet.errors import EngineError
from motet.text.tokenizer import Tokenizer
from tests.api.serving import MODEL, ROUTES, SEED, Served, Serving, WatchedEngine, chunks, saying
from tests.error_response import assert_error
from tests.tiny_tokenizer import fake_answer, save_tiny_tokenizer

pytestmark = pytest.mark.anyio

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


async def test_n_choices_are_one_group_in_order_with_the_prompt_counted_once(served: Served) -> None:
    answer = await served.openai.chat.completions.create(model=MODEL, messages=HI, n=3)
    assert [choice.message.content for choice in answer.choices] == ["hello 0", "hello 1", "hello 2"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(served.engine.requests[0].prompt)
    assert answer.usage.completion_tokens == 3 * len(fake_answer("hello 0"))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint == served.engine.info.fingerprint
    assert [choice.logprobs for choice in answer.choices] == [None] * 3
    (request,) = served.engine.requests
    assert [choice.index for choice in request.choices] == [0, 1, 2]


@pytest.mark.parametrize(
    ("seed", "seeds"), [(7, [7, 8, 9]), (-2, [2**64 - 2, 2**64 - 1, 0]), (None, [SEED, SEED + 1, SEED + 2])]
)
async def test_choice_i_has_the_requested_or_a_random_seed_plus_i_modulo_2_to_the_64(
    served: Served, seed: int | None, seeds: list[int]
) -> None:
    await served.openai.chat.completions.create(model=MODEL, messages=HI, n=3, seed=seed)
    assert [choice.seed for choice in served.engine.requests[0].choices] == seeds


NULLS = ("n", "temperature", "stop", "seed", "stream", "tools", "logit_bias", "unheard_of", "model")
NULL_FORMS = ("response_format", "structured_outputs")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict.fromkeys(NULLS + NULL_FORMS),
        {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k"},
        {"safety_identifier": "s", "stream": True, "stream_options": {"include_obfuscation": False}},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}},
        {"modalities": ["text"], "store": True, "prompt_cache_retention": "24h"},
    ],
    ids=["none", "nulls", "ignored", "ignored of a stream", "tools at their default", "others at their default"],
)
async def test_fields_without_effect_are_accepted(served: Served, fields: dict[str, Any]) -> None:
    response = await served.chat(**fields)
    assert response.status_code == 200
    answer = chunks(response)[0] if fields.get("stream") else response.json()
    assert (answer["model"], len(answer["choices"])) == (MODEL, 1)


async def test_sampling_fields_reach_the_engine(served: Served) -> None:
    await served.chat(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        logit_bias={"5": -100, "7": 2.5},
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[9],
        max_tokens=10,
        cache_salt="salt",
        keep_s=2,
        priority=3,
    )
    (request,) = served.engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.5)
    assert sampling.repetition_penalty == 1.25
    assert sampling.logit_bias == {5: -100.0, 7: 2.5}
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.stop_token_ids) == (2, True, (9,))
    assert sampling.max_tokens == 10
    assert (request.cache_salt, request.keep_s, request.priority) == ("salt", 2.0, 3)


async def test_max_completion_tokens_wins_over_max_tokens(served: Served) -> None:
    answer = await served.openai.chat.completions.create(
        model=MODEL, messages=HI, max_tokens=500, max_completion_tokens=2
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


async def test_without_max_tokens_a_choice_can_fill_the_context(served: Served) -> None:
    await served.openai.chat.completions.create(model=MODEL, messages=HI)
    (request,) = served.engine.requests
    assert request.sampling.max_tokens == served.engine.info.max_model_len - len(request.prompt)


async def test_developer_speaks_as_system_and_text_parts_are_joined(served: Served) -> None:
    await served.openai.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "short"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
    )
    text = served.prompt
    assert text.startswith("<|im_start|>system\nshort<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n")


async def test_last_message_can_be_continued(served: Served) -> None:
    turns = [*HI, {"role": "assistant", "content": "well"}]
    assert (await served.chat(messages=turns, continue_final_message=True)).status_code == 200
    text = served.prompt
    assert text.endswith("<|im_start|>assistant\nwell")


async def test_variables_of_the_request_reach_the_chat_template(serve: Serving, tmp_path: Path) -> None:
    folder = save_tiny_tokenizer(tmp_path, chat_template="{{ mood }}: {{ messages[0].content }}")
    served = await serve(tokenizer=Tokenizer.load(folder))
    assert (await served.chat(chat_template_kwargs={"mood": "good"})).status_code == 200
    assert served.tokenizer.decode(served.engine.requests[0].prompt) == "good: hi"


async def test_a_prompt_can_be_given_as_token_ids(served: Served) -> None:
    """`messages` and the other fields decide how the answer is parsed."""
    answer = (await served.chat(prompt_token_ids=[5, 6, 7], return_token_ids=True, max_tokens=2)).json()
    assert answer["prompt_token_ids"] == [5, 6, 7]
    assert answer["usage"]["prompt_tokens"] == 3
    assert list(served.engine.requests[0].prompt) == [5, 6, 7]
    for wrong in ([], [9999], [-1], "a", [1.5]):
        assert_error(await served.chat(prompt_token_ids=wrong), status=400)
    for too_long in ([5] * 5000, [5] * 200_000):
        response = await served.chat(prompt_token_ids=too_long)
        assert_error(response, status=400, param="prompt_token_ids", code="context_length_exceeded")


async def test_a_request_can_replace_the_servers_variables_of_the_chat_template(serve: Serving, tmp_path: Path) -> None:
    template = "{{ mood }}{{ enable_thinking }}{{ reasoning_effort }}: {{ messages[0].content }}"
    folder = save_tiny_tokenizer(tmp_path, chat_template=template)
    defaults = '{"mood": "good", "enable_thinking": true, "reasoning_effort": "low"}'
    served = await serve(tokenizer=Tokenizer.load(folder), default_chat_template_kwargs=defaults)
    for fields, prompt in (
        ({}, "goodTruelow: hi"),
        ({"chat_template_kwargs": {"mood": "bad"}}, "badTruelow: hi"),
        ({"reasoning_effort": "none"}, "goodFalsenone: hi"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "max"}}, "goodTruemax: hi"),
    ):
        await served.chat(**fields)
        assert served.prompt == prompt
        tokens = (await served.http.post("/tokenize", json={"messages": HI, **fields})).json()["tokens"]
        assert tokens == list(served.engine.requests[-1].prompt)
    message = {"messages": HI}
    await served.http.post("/v1/messages", json=message | {"max_tokens": 5})
    assert served.prompt == "goodTruelow: hi"
    counted = await served.http.post("/v1/messages/count_tokens", json=message)
    assert counted.json()["input_tokens"] == len(served.engine.requests[-1].prompt)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_server_can_show_tokens_as_ids_unless_a_request_says_otherwise(serve: Serving, path: str) -> None:
    served = await serve(return_tokens_as_token_ids=True)
    body = ROUTES[path] | {"logprobs": True, "max_tokens": 1}
    for field, as_ids in (({}, True), ({"return_tokens_as_token_ids": False}, False)):
        answer = (await served.http.post(path, json=body | field)).text
        assert ("token_id:" in answer) is as_ids


@pytest.mark.parametrize("path", list(ROUTES))
async def test_the_server_can_report_the_usage_in_every_stream(serve: Serving, path: str) -> None:
    served = await serve(enable_force_include_usage=True)
    body = ROUTES[path] | {"stream": True}
    for field in ({}, {"stream_options": {"include_usage": False}}):
        *sent, last = chunks(await served.http.post(path, json=body | field))
        assert (last["choices"], last["usage"]["completion_tokens"] > 0) == ([], True)
        counts = [chunk["usage"]["completion_tokens"] for chunk in sent]
        assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"]


async def test_stop_string_ends_one_choice_and_is_named(serve: Serving) -> None:
    served = await serve(saying("one END two", "three four"))
    response = await served.chat(n=2, stop="END")
    first, second = response.json()["choices"]
    assert (first["message"]["content"], first["finish_reason"], first["stop_reason"]) == ("one ", "stop", "END")
    assert (second["message"]["content"], second["stop_reason"]) == ("three four", None)


@pytest.mark.parametrize("path", [*ROUTES, "/v1/responses"])
async def test_every_route_takes_up_to_64_stop_strings_and_none(serve: Serving, path: str) -> None:
    served, num_tokens = await serve(saying("one END two")), {}
    for number in (0, 64):
        stop = {"stop": [*map(str, range(63)), "END"][:number]}
        body = ROUTES.get(path, {"input": "hi"})
        answer = await served.http.post(path, json=body | ({"sampling_params": stop} if "token_ids" in body else stop))
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        num_tokens[number] = usage.get("completion_tokens") or usage["output_tokens"]
    assert num_tokens == {0: len(fake_answer("one END two")), 64: len(fake_answer("one END", eos=False))}


async def test_stop_string_can_stay_in_the_output(serve: Serving) -> None:
    served = await serve(saying("one END two"))
    response = await served.chat(stop=["END", "zzz"], include_stop_str_in_output=True)
    assert response.json()["choices"][0]["message"]["content"] == "one END"


async def test_logprobs_hold_tokens_bytes_and_alternatives(serve: Serving) -> None:
    served = await serve(saying("é"))
    answer = await served.openai.chat.completions.create(
        model=MODEL, messages=HI, logprobs=True, top_logprobs=2, max_tokens=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.bytes for entry in logprobs.content] == [[0xC3], [0xA9]]
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2, 2]
    assert {entry.logprob for entry in logprobs.content} == {-0.5}


async def test_logprobs_without_top_logprobs_have_no_alternatives(served: Served) -> None:
    answer = await served.openai.chat.completions.create(model=MODEL, messages=HI, logprobs=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    assert [entry.top_logprobs for entry in logprobs.content] == [[]] * len(logprobs.content)


async def test_token_ids_are_returned_only_if_requested(served: Served) -> None:
    body = (await served.chat(return_token_ids=True)).json()
    assert body["prompt_token_ids"] == list(served.engine.requests[0].prompt)
    assert body["choices"][0]["token_ids"] == fake_answer("hello 0")
    body = (await served.chat()).json()
    assert (body["prompt_token_ids"], body["choices"][0]["token_ids"]) == (None, None)  # null, as in vLLM


async def test_an_engine_error_after_some_steps_still_has_its_status(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(fail_after={2: EngineError("the engine broke")}))
    response = await served.chat()
    assert response.status_code == 500
    assert response.json() == {
        "error": {"message": "the engine broke", "type": "server_error", "param": None, "code": "engine_error"}
    }
