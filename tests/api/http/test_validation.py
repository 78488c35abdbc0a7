"""Mistakes in a chat request: the status, the named field, and OpenAI's message."""

import json
from collections.abc import Iterator

import pytest

from motet.text.tokenizer import Tokenizer
from motet.types import SAMPLING_FIELDS, SamplingField
from tests.api.serving import Served, Serving
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("n", "2", "invalid_type"),
        ("n", 2.5, "invalid_type"),
        ("n", True, "invalid_type"),
        ("n", 0, "integer_below_min_value"),
        ("n", -1, "integer_below_min_value"),
        ("n", 257, "integer_above_max_value"),
        ("temperature", -0.1, "decimal_below_min_value"),
        ("temperature", 2.1, "decimal_above_max_value"),
        ("temperature", "1", "invalid_type"),
        ("top_p", 0, "decimal_below_min_value"),
        ("top_p", 1.1, "decimal_above_max_value"),
        ("top_k", -2, "integer_below_min_value"),
        ("min_p", 1.5, "decimal_above_max_value"),
        ("presence_penalty", 2.5, "decimal_above_max_value"),
        ("frequency_penalty", -2.5, "decimal_below_min_value"),
        ("repetition_penalty", 0, "decimal_below_min_value"),
        ("logit_bias", {"5": 101}, None),
        ("logit_bias", {"x": 1}, "invalid_value"),
        ("logit_bias", {"99999": 1}, "invalid_value"),
        ("logit_bias", [5], "invalid_type"),
        ("seed", 2**64, "integer_above_max_value"),
        ("seed", -(2**63) - 1, "integer_below_min_value"),
        ("seed", 1.5, "invalid_type"),
        ("stop", ["a"] * 65, "array_above_max_length"),
        ("stop", [""], None),
        ("stop", "", None),
        ("stop", 5, "invalid_type"),
        ("stop_token_ids", [-1], None),
        ("stop_token_ids", [99999], "invalid_value"),
        ("logprob_token_ids", [5], "invalid_value"),
        ("allowed_token_ids", [], "array_below_min_length"),
        ("allowed_token_ids", [5, 99999], "invalid_value"),
        ("allowed_token_ids", [5] * 16_385, "array_above_max_length"),
        ("allowed_token_ids", [True], "invalid_type"),
        ("max_tokens", 0, "integer_below_min_value"),
        ("max_completion_tokens", 0, "integer_below_min_value"),
        ("logprobs", 1, "invalid_type"),
        ("top_logprobs", 2, None),
        ("stream", "yes", "invalid_type"),
        ("stream_options", {"include_usage": True}, None),
        ("min_tokens", -1, "integer_below_min_value"),
        ("messages", [], "array_below_min_length"),
        ("messages", None, "missing_required_parameter"),
        ("messages", "hi", "invalid_type"),
        ("unheard_of", 1, "unknown_parameter"),
        ("tools", [{"type": "function"}], "missing_required_parameter"),
        ("tool_choice", "required", "invalid_value"),
        ("guided_json", {}, "unsupported_parameter"),
        ("reasoning_effort", "utmost", "invalid_value"),
        ("chat_template_kwargs", {"chat_template": "{{ 1 }}"}, "unsupported_parameter"),
        ("functions", [{"name": "f"}], "unsupported_parameter"),
        ("function_call", {"name": "f"}, "unsupported_parameter"),
        ("parallel_tool_calls", "no", "invalid_type"),
        ("include_reasoning", 1, "invalid_type"),
        ("separate_reasoning", "no", "invalid_type"),
        ("modalities", ["text", "audio"], "unsupported_parameter"),
        ("kv_transfer_params", {}, "unsupported_parameter"),
        ("echo", True, "unsupported_parameter"),
        ("best_of", 2, "unsupported_parameter"),
        ("chat_template", "{{ 1 }}", "unsupported_parameter"),
        ("model", 5, "invalid_type"),
    ],
)
async def test_field_is_refused_by_name(refusing: Served, field: str, value: object, code: str | None) -> None:
    response = await refusing.chat(**{field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"].partition(".")[0].partition("[")[0] == field
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    if code is not None:
        assert error["code"] == code


async def test_a_former_field_is_refused_with_its_successor(refusing: Served) -> None:
    response = await refusing.chat(functions=[{"name": "f"}])
    assert response.json()["error"]["message"].endswith("'functions' is not supported by this server: use 'tools'.")


RANGED = [(name, field) for name, field in SAMPLING_FIELDS.items() if field.verbatim and field.low is not None]


@pytest.mark.parametrize(("name", "field"), RANGED, ids=[name for name, _ in RANGED])
async def test_a_sampling_field_has_the_declared_range_and_reaches_the_engine(
    served: Served, name: str, field: SamplingField
) -> None:
    low, high = field.low, field.high
    assert low is not None and high is not None
    for value in (low - 0.5, high + 0.5, *([low] if field.above_low else [])):
        assert_error(await served.chat(max_tokens=2, **{name: value}), status=400, param=name)
    for value in (high, (low + high) / 2):
        assert (await served.chat(max_tokens=2, **{name: value})).status_code == 200
        assert getattr(served.engine.requests[-1].sampling, name) == value


async def test_top_logprobs_at_its_default_needs_no_logprobs(served: Served) -> None:
    (choice,) = (await served.chat(max_tokens=2, top_logprobs=0)).json()["choices"]
    assert choice["logprobs"] is None


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n", "2", "Invalid type for 'n': expected an integer, but got a string instead."),
        ("n", 0, "Invalid 'n': integer below minimum value. Expected a value >= 1, but got 0 instead."),
        (
            "temperature",
            2.5,
            "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 2.5 instead.",
        ),
        ("unheard_of", 1, "Unknown parameter: 'unheard_of'."),
        ("messages", None, "Missing required parameter: 'messages'."),
        (
            "stop",
            ["a"] * 65,
            "Invalid 'stop': array too long. Expected maximum length 64, but got length 65.",
        ),
        (
            "messages",
            [{"role": "poet", "content": "o"}],
            "Invalid value: 'poet'. Supported values are: 'system', 'developer', 'user', 'assistant' or 'tool'.",
        ),
        (
            "stream_options",
            {"include_usage": True},
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
        ),
        (
            "messages",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "Invalid content part 'messages[0].content[0]': 'image_url' is not supported by this model; only text is.",
        ),
    ],
)
async def test_message_is_openais_message(refusing: Served, field: str, value: object, message: str) -> None:
    assert (await refusing.chat(**{field: value})).json()["error"]["message"] == message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b'{"messages": NaN'])
async def test_body_that_is_no_json_object_is_a_400(refusing: Served, body: bytes) -> None:
    response = await refusing.http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        (None, 200),
        ("", 200),
        ("Application/JSON ; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("application/jsonx", 400),
        ("text/plain", 400),
        ("application/x-www-form-urlencoded", 400),
    ],
)
async def test_json_is_read_unless_the_content_type_is_another(
    served: Served, content_type: str | None, status: int
) -> None:
    """Browsers let the pages of any site post text and forms to a server on the user's machine."""
    headers = {} if content_type is None else {"content-type": content_type}
    for route, body in (("/v1/completions", {"prompt": "x"}), ("/v1/responses", {"input": "x"})):
        answer = await served.http.post(route, content=json.dumps(body), headers=headers)
        assert answer.status_code == status, answer.text
        assert status == 200 or answer.json()["error"]["message"].startswith(
            f"Unsupported content type {content_type!r}"
        )


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        (b'"prompt": "\\ud800"', 400, "prompt"),
        (b'"prompt": "hi", "cache_salt": "\\ud800"', 400, "cache_salt"),
        (b'"prompt": "hi", "stop": "\\ud800"', 400, "stop[0]"),
        (b'"prompt": "hi", "logit_bias": {"\\ud800": 1}', 400, "logit_bias"),
        (b'"prompt": "hi", "model": "\\ud800"', 404, "model"),
        (b'"prompt": "hi", "temperature": NaN', 400, "temperature"),
    ],
)
async def test_json_values_that_no_engine_can_read_are_refused(
    refusing: Served, fields: bytes, status: int, param: str
) -> None:
    assert_error(await refusing.http.post("/v1/completions", content=b"{%b}" % fields), status=status, param=param)


@pytest.mark.parametrize("name", ["reasoning_effort", "x" * 100_000])
async def test_a_long_wrong_value_is_shortened_in_the_error(served: Served, name: str) -> None:
    response = await served.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], name: "x" * 100_000}
    )
    error = response.json()["error"]
    assert error["message"].startswith(("Invalid value: 'xxx", "Unknown parameter: 'xxx"))
    assert max(len(error["message"]), len(error["param"])) < 3_000


@pytest.mark.parametrize(("top_k", "kept"), [(-1, 0), (2**63, 512), (10**30, 512)])
async def test_top_k_of_minus_one_is_off_and_of_more_than_the_vocabulary_all_of_it(
    served: Served, top_k: int, kept: int
) -> None:
    assert (await served.complete(top_k=top_k)).status_code == 200
    assert (served.engine.requests[0].sampling.top_k, served.engine.info.vocab_size) == (kept, 512)


async def test_the_server_sets_the_largest_n_and_the_error_names_its_flag(serve: Serving) -> None:
    for max_n, most, flag in ((4, 4, "--max-n"), (2000, 1024, "--max-num-seqs"), (256, 256, "--max-n")):
        served = await serve(max_n=max_n)
        refused = await served.chat(n=most + 1)
        assert_error(refused, status=400, param="n")
        assert f"<= {most}, but got {most + 1} instead. The server's {flag} " in refused.json()["error"]["message"]
    assert (await served.chat(n=256)).status_code == 200


async def test_model_without_a_template_takes_no_chats(serve: Serving, tokenizer_without_template: Tokenizer) -> None:
    served = await serve(tokenizer=tokenizer_without_template)
    response = await served.chat()
    assert response.status_code == 400
    assert "template" in response.json()["error"]["message"]


async def test_too_long_a_chat_names_the_context_length(served: Served) -> None:
    response = await served.chat("x" * 5000)
    assert_error(response, status=400, code="context_length_exceeded")
    assert response.json()["error"]["param"] == "messages"


HALF = "\ud800"
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
WITH_TEXT: list[tuple[str, dict[str, object]]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "t"}], "name": "n"},
                {"role": "assistant", "content": "c", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": "r"},
            ],
            "tools": [TOOL],
            "stop": ["x"],
            "metadata": {"k": "v"},
            "user": "u",
            "chat_template_kwargs": {"a": "b"},
        },
    ),
    ("/v1/completions", {"prompt": "hi", "structured_outputs": {"choice": ["a"]}}),
    ("/v1/completions", {"prompt": "hi", "structured_outputs": {"regex": "a"}}),
    ("/v1/completions", {"prompt": "hi", "structured_outputs": {"json": {"enum": ["a"]}}}),
    ("/v1/completions", {"prompt": "hi", "structured_outputs": {"grammar": 'start: "a"'}}),
    ("/v1/responses", {"input": [{"role": "user", "content": "x"}], "instructions": "i", "metadata": {"k": "v"}}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "system": "s", "max_tokens": 1}),
    ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 1}, "cache_salt": "s"}),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}),
]


def halved(value: object) -> Iterator[object]:
    """Yields the value with a lone surrogate at the end of one of its strings or names, for each of them."""
    if isinstance(value, str):
        yield value + HALF
    elif isinstance(value, list):
        for place, one in enumerate(value):
            yield from ([*value[:place], other, *value[place + 1 :]] for other in halved(one))
    elif isinstance(value, dict):
        for name, one in value.items():
            yield {other: content for other, content in value.items() if other != name} | {name + HALF: one}
            yield from ({**value, name: other} for other in halved(one))


@pytest.mark.parametrize(("path", "body"), WITH_TEXT)
async def test_a_lone_surrogate_anywhere_is_at_most_a_refusal(
    served: Served, path: str, body: dict[str, object]
) -> None:
    for stream in (False, True) if path.startswith("/v1") else (None,):
        for odd in halved(body):
            streaming = {"stream": stream} if stream is not None else {}
            response = await served.http.post(path, content=json.dumps(odd | streaming))  # type: ignore[operator]
            assert response.status_code in (200, 400, 404), (odd, response.text)


async def test_all_wrong_keys_of_a_bias_are_named_at_once(served: Served) -> None:
    for keys, message in (
        (["a", "5", "-1", "1.5"], "Invalid keys in 'logit_bias': a, -1, 1.5. You"),
        (["600", "5", "700"], "vocabulary of 512 has no token 600, 700"),
        ([f"k{number}" for number in range(15)], "k8, k9 and 5 more. You"),
    ):
        refused = await served.complete(logit_bias=dict.fromkeys(keys, 1))
        assert_error(refused, status=400, param="logit_bias")
        assert message in refused.json()["error"]["message"]
