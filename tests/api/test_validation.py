"""What a chat request may not say: status, the field that is named, and OpenAI's words."""

import pytest

from motet.config import ServerConfig
from motet.text.tokenizer import Tokenizer
from tests.api.serving import MODEL, Served, Serving

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("n", "2", "invalid_type"),
        ("n", 2.0, "invalid_type"),
        ("n", True, "invalid_type"),
        ("n", 0, "integer_below_min_value"),
        ("n", 129, "integer_above_max_value"),
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
        ("stop", [], "array_below_min_length"),
        ("stop", ["a", "b", "c", "d", "e"], "array_above_max_length"),
        ("stop", "", None),
        ("stop", 5, "invalid_type"),
        ("stop_token_ids", [-1], None),
        ("stop_token_ids", [99999], "invalid_value"),
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
        ("reasoning_effort", "high", "unsupported_parameter"),
        ("store", True, "unsupported_parameter"),
        ("modalities", ["text", "audio"], "unsupported_parameter"),
        ("kv_transfer_params", {}, "unsupported_parameter"),
        ("echo", True, "unsupported_parameter"),
        ("best_of", 2, "unknown_parameter"),
        ("chat_template", "{{ 1 }}", "unsupported_parameter"),
        ("model", 5, "invalid_type"),
    ],
)
async def test_field_is_refused_by_name(refusing: Served, field: str, value: object, code: str | None) -> None:
    response = await refusing.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], field: value}
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"].partition(".")[0].partition("[")[0] == field
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    if code is not None:
        assert error["code"] == code


async def test_top_logprobs_at_its_default_needs_no_logprobs(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "top_logprobs": 0}
    response = await served.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert response.json()["choices"][0]["logprobs"] is None


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
            ["a", "b", "c", "d", "e"],
            "Invalid 'stop': array too long. Expected maximum length 4, but got length 5.",
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
    ],
)
async def test_message_is_in_openais_words(refusing: Served, field: str, value: object, message: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], field: value}
    response = await refusing.http.post("/v1/chat/completions", json=body)
    assert response.json()["error"]["message"] == message


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[1].content[0]"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}]},
            "messages[1].content[1]",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "extra": 1}]}, "messages[1].content[0].extra"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "poet", "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user", "content": "x", "extra": 1}, "messages[1].extra"),
    ],
)
async def test_bad_message_is_named_by_its_place(refusing: Served, message: dict[str, object], param: str) -> None:
    body = {"messages": [{"role": "system", "content": "s"}, message]}
    response = await refusing.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_unsupported_part_is_named_in_the_message(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    response = await served.http.post("/v1/chat/completions", json=body)
    assert "image_url" in response.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b'{"messages": NaN'])
async def test_body_that_is_no_json_object_is_a_400(refusing: Served, body: bytes) -> None:
    response = await refusing.http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_json_is_read_without_a_content_type(served: Served) -> None:
    response = await served.http.post("/v1/completions", content=b'{"prompt": "x"}')
    assert response.status_code == 200


async def test_nan_is_not_a_temperature(served: Served) -> None:
    response = await served.http.post("/v1/completions", content=b'{"prompt": "x", "temperature": NaN}')
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        (b'"prompt": "\\ud800"', 400, "prompt"),
        (b'"prompt": "hi", "cache_salt": "\\ud800"', 400, "cache_salt"),
        (b'"prompt": "hi", "stop": "\\ud800"', 400, "stop[0]"),
        (b'"prompt": "hi", "logit_bias": {"\\ud800": 1}', 400, "logit_bias"),
        (b'"prompt": "hi", "model": "\\ud800"', 404, "model"),
    ],
)
async def test_half_a_surrogate_pair_is_not_text(refusing: Served, fields: bytes, status: int, param: str) -> None:
    response = await refusing.http.post("/v1/completions", content=b"{%b}" % fields)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize("name", ["reasoning_effort", "x" * 100_000])
async def test_a_long_mistake_is_not_sent_back_whole(served: Served, name: str) -> None:
    response = await served.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], name: "x" * 100_000}
    )
    error = response.json()["error"]
    assert error["message"].startswith(("Invalid value: 'xxx", "Unknown parameter: 'xxx"))
    assert max(len(error["message"]), len(error["param"])) < 3_000


async def test_min_tokens_over_max_tokens_is_a_400(served: Served) -> None:
    response = await served.chat(min_tokens=5, max_tokens=4)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "min_tokens"


@pytest.mark.parametrize("min_tokens", [17, 10**30])
async def test_min_tokens_over_the_default_of_max_tokens_is_a_400(served: Served, min_tokens: int) -> None:
    response = await served.complete(min_tokens=min_tokens)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "min_tokens"


@pytest.mark.parametrize("top_k", [2**63, 10**30])
async def test_top_k_over_the_vocabulary_keeps_all_of_it(served: Served, top_k: int) -> None:
    assert (await served.complete(top_k=top_k)).status_code == 200
    assert served.engine.requests[0].sampling.top_k == served.engine.info.vocab_size


async def test_logit_bias_key_of_thousands_of_digits_is_a_400(served: Served) -> None:
    response = await served.complete(logit_bias={"9" * 5000: 1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logit_bias"


async def test_largest_n_is_the_servers_choice(serve: Serving) -> None:
    served = await serve(config=ServerConfig(served_model_name=MODEL, max_n=4))
    assert (await served.chat(n=4)).status_code == 200
    response = await served.chat(n=5)
    assert response.status_code == 400
    assert "<= 4" in response.json()["error"]["message"]


async def test_model_without_a_template_takes_no_chats(serve: Serving, tokenizer_without_template: Tokenizer) -> None:
    served = await serve(tokenizer=tokenizer_without_template)
    response = await served.chat()
    assert response.status_code == 400
    assert "template" in response.json()["error"]["message"]


async def test_too_long_a_chat_names_the_context_length(served: Served) -> None:
    response = await served.chat("x" * 5000)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert response.json()["error"]["param"] == "messages"
