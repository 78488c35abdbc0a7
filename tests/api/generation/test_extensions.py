"""Fields of vLLM, Dynamo, SGLang and LMDeploy that mean the same as fields of this server, or shorten prompts."""

from pathlib import Path
from typing import Any

import pytest

from motet.api.http.unknown_fields import IGNORED_HEADER
from motet.text.tokenizer import Tokenizer
from tests.api.serving import PROMPT, Served, Serving, chunks, group_lines
from tests.error_response import assert_error
from tests.tiny_tokenizer import save_tiny_tokenizer

pytestmark = pytest.mark.anyio

TURN = {"role": "user", "content": "hi"}
CHAT, COMPLETIONS, RESPONSES, GENERATE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/inference/v1/generate",
)
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [TURN]},
    COMPLETIONS: {"prompt": PROMPT},
    RESPONSES: {"input": "hi"},
}
LENGTH = 4096
VARIABLES = (
    "{% for message in messages %}{{ message.content }}{% endfor %}|{{ enable_thinking }}|"
    "{% for document in documents or [] %}{{ document.text }},{% endfor %}"
)


@pytest.fixture
async def with_variables(serve: Serving, tmp_path: Path) -> Served:
    """A server whose chat template shows `enable_thinking` and `documents`."""
    return await serve(tokenizer=Tokenizer.load(save_tiny_tokenizer(tmp_path, chat_template=VARIABLES)))


def prompts(served: Served) -> list[str]:
    return [served.tokenizer.decode(request.prompt) for request in served.engine.requests]


@pytest.mark.parametrize("path", list(BODIES))
async def test_nvext_stands_for_fields_of_the_request(served: Served, path: str) -> None:
    ext = {"ignore_eos": True, "top_k": 7, "greed_sampling": True, "cache_salt": "s"}
    same = {"ignore_eos": True, "top_k": 7, "temperature": 0, "cache_salt": "s"}
    for fields in ({"nvext": ext, "temperature": 1.5}, same):
        answer = await served.http.post(path, json=BODIES[path] | fields | {"seed": 1})
        assert answer.status_code == 200, answer.text
    first, second = served.engine.requests
    assert (first.sampling, first.cache_salt) == (second.sampling, second.cache_salt)
    assert (await served.http.post(path, json=BODIES[path] | {"nvext": {"top_k": 7}, "top_k": 3})).status_code == 200
    assert served.engine.requests[-1].sampling.top_k == 3


async def test_the_annotation_token_ids_adds_them(served: Served) -> None:
    answer = await served.complete(PROMPT, nvext={"annotations": ["token_ids", "request_id", "llm_metrics"]})
    (choice,) = answer.json()["choices"]
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["token_ids"]
    assert answer.headers[IGNORED_HEADER] == "nvext.annotations.llm_metrics"


async def test_other_members_of_nvext_are_ignored_by_name(served: Served) -> None:
    ext = {"agent_hints": {"priority": 1}, "router": None, "top_k": 2, "dp_rank": 0}
    answer = await served.chat(nvext=ext, stream=True)
    assert chunks(answer)
    assert answer.headers[IGNORED_HEADER] == "nvext.agent_hints, nvext.dp_rank"


@pytest.mark.parametrize(
    ("ext", "param"),
    [
        (5, "nvext"),
        ({"top_k": -2}, "nvext.top_k"),
        ({"top_k": "x"}, "nvext.top_k"),
        ({"greed_sampling": 1}, "nvext.greed_sampling"),
        ({"annotations": "token_ids"}, "nvext.annotations"),
        ({"annotations": ["x"] * 65}, "nvext.annotations"),
        ({"cache_salt": 5}, "nvext.cache_salt"),
    ],
)
async def test_a_wrong_member_of_nvext_is_refused(refusing: Served, ext: object, param: str) -> None:
    assert_error(await refusing.complete(PROMPT, nvext=ext), status=400, param=param)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", ["request_id", "rid"])
async def test_the_body_names_a_request(served: Served, caplog: pytest.LogCaptureFixture, path: str, name: str) -> None:
    caplog.set_level("INFO", "motet.api")
    assert (await served.http.post(path, json=BODIES[path] | {name: "mine-1"})).status_code == 200
    headers = {"x-request-id": "of-the-header"}
    assert (await served.http.post(path, json=BODIES[path] | {name: "mine-2"}, headers=headers)).status_code == 200
    assert [line["request_id"] for line in group_lines(caplog)] == ["mine-1", "of-the-header"]
    refused = await served.http.post(path, json=BODIES[path] | {name: "two words"})
    assert_error(refused, status=400, param="request_id", code="invalid_value")


async def test_fields_have_the_names_of_other_servers(served: Served) -> None:
    for fields in ({"min_new_tokens": 2, "no_stop_trim": True}, {"min_tokens": 2, "include_stop_str_in_output": True}):
        for path in (CHAT, COMPLETIONS, RESPONSES):
            assert (await served.http.post(path, json=BODIES[path] | fields | {"seed": 1})).status_code == 200
    requests = [request.sampling for request in served.engine.requests]
    assert requests[:3] == requests[3:]
    assert {sampling.min_tokens for sampling in requests} == {2}


async def test_thinking_can_be_set_next_to_the_variables_of_the_template(with_variables: Served) -> None:
    for fields in (
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_args": {"enable_thinking": False}},
        {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
    ):
        assert (await with_variables.chat(**fields)).status_code == 200
    assert {prompt.split("|")[1] for prompt in prompts(with_variables)} == {"False"}
    tokens = await with_variables.http.post("/tokenize", json={"messages": [TURN], "enable_thinking": True})
    assert with_variables.tokenizer.decode(tokens.json()["tokens"]).split("|")[1] == "True"


async def test_documents_reach_the_template(with_variables: Served, served: Served) -> None:
    given = [{"title": "a", "text": "one"}, {"text": "two"}]
    assert (await with_variables.chat(documents=given)).status_code == 200
    assert (await with_variables.chat(documents=[])).status_code == 200
    assert [prompt.split("|")[2] for prompt in prompts(with_variables)] == ["one,two,", ""]
    refused = await served.chat(documents=given)
    assert_error(refused, status=400, param="documents", code="unsupported_parameter")
    assert (await served.chat(documents=[])).status_code == 200
    assert_error(await with_variables.chat(documents=["x"]), status=400, param="documents[0]")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
async def test_detection_of_repetition_is_refused_by_name(refusing: Served, path: str) -> None:
    refused = await refusing.http.post(path, json=BODIES[path] | {"repetition_detection": {"max_pattern_size": 4}})
    assert_error(refused, status=400, param="repetition_detection", code="unsupported_parameter")
    assert "repetition_penalty" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [5, 6, 7]),
        ({"truncate_prompt_tokens": 5}, [5, 6, 7, 8, 9]),
        ({"truncate_prompt_tokens": LENGTH}, [5, 6, 7, 8, 9]),
        ({"truncate_prompt_tokens": -1}, [5, 6, 7, 8, 9]),
        ({"truncation_side": "right"}, [5, 6, 7, 8, 9]),
    ],
)
async def test_a_prompt_is_shortened(served: Served, fields: dict[str, Any], kept: list[int]) -> None:
    prompt = [5, 6, 7, 8, 9]
    answer = await served.complete([prompt, [5]], return_token_ids=True, **fields)
    assert [choice["prompt_token_ids"] for choice in answer.json()["choices"]] == [kept, [5]]
    assert answer.json()["usage"]["prompt_tokens"] == len(kept) + 1
    chat = await served.chat(prompt_token_ids=prompt, return_token_ids=True, **fields)
    assert chat.json()["prompt_token_ids"] == kept
    body = {"token_ids": prompt, "sampling_params": fields, "return_token_ids": True, "stream": True}
    tokens = await served.http.post(GENERATE, json=body)
    assert chunks(tokens)[0]["prompt_token_ids"] == kept


async def test_a_text_is_shortened_and_repeated_as_it_was_used(served: Served) -> None:
    shown = await served.complete("hello there", truncate_prompt_tokens=2, echo=True, max_tokens=0, logprobs=0)
    (choice,) = shown.json()["choices"]
    assert len(choice["logprobs"]["tokens"]) == 2
    assert (
        choice["text"]
        == served.tokenizer.decode(served.engine.requests[0].prompt)
        == "".join(choice["logprobs"]["tokens"])
    )
    assert (await served.chat("hello there", truncate_prompt_tokens=4)).json()["usage"]["prompt_tokens"] == 4


async def test_a_prompt_is_shortened_to_what_its_answer_leaves(served: Served) -> None:
    long = [5] * (LENGTH + 100)
    answer = await served.complete(long, truncate_prompt_tokens=-1, max_tokens=10)
    assert answer.json()["usage"]["prompt_tokens"] == LENGTH - 10
    assert (await served.complete(long, truncate_prompt_tokens=-1)).json()["usage"]["prompt_tokens"] == LENGTH - 16
    chat = await served.chat(prompt_token_ids=long, truncate_prompt_tokens=-1)
    assert chat.json()["usage"]["prompt_tokens"] == LENGTH - 1
    refused = await served.complete(long, truncate_prompt_tokens=-1, max_tokens=LENGTH)
    assert_error(refused, status=400, code="context_length_exceeded")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": LENGTH + 1}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "middle"}, "truncation_side"),
    ],
)
async def test_another_length_is_refused(refusing: Served, fields: dict[str, Any], param: str) -> None:
    assert_error(await refusing.complete(PROMPT, **fields), status=400, param=param)
    body = {"token_ids": PROMPT, "sampling_params": fields}
    assert_error(await refusing.http.post(GENERATE, json=body), status=400, param=f"sampling_params.{param}")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, GENERATE])
async def test_bad_words_become_tokens_at_the_start_and_after_a_space(served: Served, path: str) -> None:
    fields = {"bad_words": ["hello", " hello", "qqq"]}
    body = {"token_ids": PROMPT, "sampling_params": fields} if path == GENERATE else BODIES[path] | fields
    assert (await served.http.post(path, json=body)).status_code == 200
    (request,) = served.engine.requests
    encode = served.tokenizer.encode
    texts = ("hello", " hello", "qqq", " qqq")
    assert request.sampling.bad_word_ids == tuple(tuple(encode(text, add_special_tokens=False)) for text in texts)
    assert request.sampling.bad_words == ("hello", " hello", "qqq")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bad_words": "hello"}, "bad_words"),
        ({"bad_words": ["ok", " "]}, "bad_words[1]"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"bad_words": ["x" * 4000] * 3}, "bad_words"),
        ({"extra_args": []}, "extra_args"),
        ({"extra_args": {"a": "x" * 20_000}}, "extra_args"),
        ({"extra_args": {"kv_transfer_params": {"do_remote_prefill": True}}}, "extra_args"),
        ({"vllm_xargs": {"a": 1}, "extra_args": {"a": 2}}, "vllm_xargs"),
    ],
)
async def test_wrong_words_and_arguments_are_refused(refusing: Served, fields: dict[str, Any], param: str) -> None:
    assert_error(await refusing.complete(PROMPT, **fields), status=400, param=param)


async def test_a_list_of_allowed_tokens_needs_one_that_is_not_bad(served: Served) -> None:
    (word,) = served.tokenizer.encode("hello", add_special_tokens=False)
    refused = await served.complete(PROMPT, bad_words=["hello"], allowed_token_ids=[word])
    assert_error(refused, status=400, param="bad_words")
    assert (await served.complete(PROMPT, bad_words=["hello"], allowed_token_ids=[word, 7])).status_code == 200


async def test_extra_arguments_reach_the_engine_and_are_rendered(served: Served) -> None:
    each: list[dict[str, Any]] = [{name: {"a": [1, "b"]}} for name in ("vllm_xargs", "extra_args")]
    for fields in [*each, {"vllm_xargs": {}}]:
        assert (await served.complete(PROMPT, **fields)).status_code == 200
    sent = [request.sampling.extra_args for request in served.engine.requests]
    assert sent == ['{"a":[1,"b"]}', '{"a":[1,"b"]}', ""]
    body = {"prompt": PROMPT, "vllm_xargs": {"a": 1}, "bad_words": ["hello"]}
    (rendered,) = (await served.http.post("/v1/completions/render", json=body)).json()
    assert (rendered["sampling_params"]["extra_args"], rendered["sampling_params"]["bad_words"]) == (
        {"a": 1},
        ["hello"],
    )
    assert (await served.http.post(GENERATE, json=rendered)).status_code == 200
    assert served.engine.requests[-1].sampling.bad_word_ids
    assert served.engine.requests[-1].sampling.extra_args == '{"a":1}'


async def test_transfer_parameters_among_extra_arguments_are_those_of_the_request(served: Served) -> None:
    sampling = {"max_tokens": 1, "extra_args": {"kv_transfer_params": {"do_remote_decode": True}}}
    refused = await served.http.post(GENERATE, json={"token_ids": PROMPT, "sampling_params": sampling})
    assert_error(refused, status=400, param="kv_transfer_params")  # this server has no role
    sampling["extra_args"] = {"kv_transfer_params": None, "a": 1}
    answer = await served.http.post(GENERATE, json={"token_ids": PROMPT, "sampling_params": sampling})
    assert answer.status_code == 200
    assert served.engine.requests[-1].sampling.extra_args == '{"a":1}'


async def test_the_template_of_a_request_needs_a_server_that_trusts_it(serve: Serving) -> None:
    source = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}{{ extra }}"
    fields = {"chat_template": source, "chat_template_kwargs": {"extra": "!"}}
    refused = await (await serve()).chat(**fields)
    assert_error(refused, status=400, param="chat_template", code="unsupported_parameter")
    served = await serve(trust_request_chat_template=True)
    assert (await served.chat(**fields)).status_code == 200
    tokens = await served.http.post("/tokenize", json={"messages": [TURN], **fields})
    assert (await served.chat()).status_code == 200
    own, models = prompts(served)
    assert own == served.tokenizer.decode(tokens.json()["tokens"]) == "<user>hi!"
    assert models != own


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'x'.replace( }}", "{{ raise_exception('no') }}", "x" * 65_537])
async def test_a_wrong_template_of_a_request_is_refused(serve: Serving, source: str) -> None:
    served = await serve(trust_request_chat_template=True)
    refused = await served.chat(chat_template=source)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] in ("chat_template", "messages")
