"""A request that is rendered, generated and derendered has the answer of the request itself."""

from collections.abc import Callable
from typing import Any, TypeVar

import httpx
import pytest

from motet.api.http.caller import Caller
from motet.api.vllm import derender
from motet.api.vllm.derender import DerenderedAnswer
from motet.api.vllm.derender_schema import GeneratedChoice
from tests.api.calling import PARIS, TIME, WEATHER, CallingServing
from tests.api.serving import PROMPT, Served, Serving, saying
from tests.error_response import assert_error
from tests.tiny_tokenizer import fake_answer

pytestmark = pytest.mark.anyio

T = TypeVar("T")
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
MESSAGES: list[dict[str, object]] = [{"role": "user", "content": "hi"}]
TOOLS = [WEATHER, TIME]
CHOICE: dict[str, object] = {"index": 0, "token_ids": [5, 6], "finish_reason": "length"}


async def generated(served: Served, body: dict[str, Any]) -> dict[str, Any]:
    """Returns an answer as vLLM sends it, without Motet's own fields."""
    response = await served.http.post(GENERATE, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Returns an answer without its id and time, and without the ids of its calls."""
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            call.pop("id", None)
    return {name: value for name, value in answer.items() if name not in ("id", "created", "kv_transfer_params")}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "seed": 3},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": "rain", "n": 3},
        {"stop": "rain", "include_stop_str_in_output": True},
        {"max_tokens": 3, "return_token_ids": True},
        {"tools": TOOLS, "n": 4},
        {"tools": TOOLS, "tool_choice": "none", "n": 4},
        {"include_reasoning": False, "n": 4},
        {"include_reasoning": False, "n": 4, "logprobs": True, "return_token_ids": True},
        {"separate_reasoning": False, "n": 4},
        {"tools": TOOLS, "tool_choice": "required", "max_tokens": 9},
        {"tools": TOOLS, "response_format": {"type": "json_object"}, "max_tokens": 9},
        {"logprobs": True, "logprob_token_ids": [5, 6]},
    ],
)
async def test_a_derendered_chat_is_the_answer_itself(serve_tools: CallingServing, fields: dict[str, Any]) -> None:
    answers = PARIS, "It rains. 日本 😀", f"<think>Where?</think>{PARIS}", "<think>Hm.</think>No."
    served = await serve_tools(saying(*answers))
    request = {"messages": MESSAGES, "temperature": 0.5, **fields}
    expected = (await served.http.post(CHAT, json=request)).json()
    rendered = (await served.http.post(f"{CHAT}/render", json=request)).json()
    response = await generated(served, rendered)
    body = {"generate_response": response, "chat_request": request}
    for prompt in ({}, {"prompt_token_ids": rendered["token_ids"], "prompt_tokens": len(rendered["token_ids"])}):
        body["chat_request"] = request | {"kv_transfer_params": {}}  # it was for the generation
        derendered = await served.http.post(f"{CHAT}/derender", json=body | prompt)
        assert derendered.status_code == 200, derendered.text
        assert derendered.json()["id"] == response["request_id"]
        assert comparable(derendered.json()) == comparable(dict(expected))
    inline = await generated(served, rendered | {"output_mode": "derender"})
    assert inline["output_mode"] == "derender"
    texts = (await generated(served, rendered | {"output_mode": "text"}))["choices"]
    hidden = not fields.get("include_reasoning", True)
    for choice, other in zip(comparable(inline)["choices"], comparable(dict(expected))["choices"], strict=True):
        assert (choice["message"], choice["finish_reason"]) == (other["message"], other["finish_reason"])
        assert without_ids(choice["logprobs"]) == without_ids(other["logprobs"])
        assert (choice["token_ids"] is None, "text" not in choice) == (hidden, hidden)
    if not hidden:
        assert [choice["text"] for choice in inline["choices"]] == [choice["text"] for choice in texts]


def without_ids(logprobs: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the entries without the fields that only generate has."""

    def plain(entry: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in entry.items() if name not in ("token_id", "rank")}

    entries = (logprobs or {}).get("content") or []
    return [plain(entry) | {"top_logprobs": [*map(plain, entry["top_logprobs"])]} for entry in entries]


@pytest.mark.parametrize("named", [False, True])
async def test_a_message_needs_the_parse_context_of_a_model_that_reasons(
    serve: Serving, serve_tools: CallingServing, named: bool
) -> None:
    """Without a context, reasoning would be shown as content."""
    served = await serve_tools(saying("hi")) if named else await serve(saying("hi"))
    body = {"token_ids": [5, 6], "output_mode": "derender"}
    response = await served.http.post(GENERATE, json=body)
    if named:
        assert_error(response, status=400, param="parse_context")
    else:
        assert response.json()["choices"][0]["message"]["content"] == "hi"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"choices": [{"index": 0, "token_ids": [5]}]}, "choices"),
        ({"sampling_params": {"detokenize": False}}, "sampling_params.detokenize"),
        ({"parse_context": {"tool_choice": {"type": "function", "function": {"name": "no"}}}}, "tool_choice"),
        ({"parse_context": {"tools": TOOLS, "from_a_newer_server": 1}}, "parse_context.from_a_newer_server"),
        ({"output_mode": "bogus"}, "output_mode"),
    ],
)
async def test_wrong_derendered_requests_are_refused(served: Served, fields: dict[str, object], param: str) -> None:
    body = {"token_ids": [5, 6], "output_mode": "derender"} | fields
    response = await served.http.post(GENERATE, json=body)
    assert response.status_code == 400
    assert param in response.json()["error"]["param"]


async def test_other_modes_ignore_the_parse_context(served: Served) -> None:
    body = {"token_ids": [5, 6], "parse_context": {"from_a_newer_server": 1}}
    assert (await served.http.post(GENERATE, json=body)).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "hello"},
        {"prompt": ["hello", "there"], "n": 2, "seed": 3},
        {"prompt": PROMPT, "logprobs": 2, "max_tokens": 4},
        {"prompt": PROMPT, "skip_special_tokens": False},
    ],
)
async def test_derendered_completions_are_the_answer_itself(serve: Serving, fields: dict[str, Any]) -> None:
    served = await serve(saying("It rains. 日本 😀", "Yes."))
    expected = (await served.http.post(COMPLETIONS, json=fields)).json()
    rendered = (await served.http.post(f"{COMPLETIONS}/render", json=fields)).json()
    responses = [await generated(served, one | {"return_token_ids": True}) for one in rendered]
    body = {"generate_responses": responses, "completion_request": fields}
    for prompt in ({}, {"prompt_tokens": [len(one["token_ids"]) for one in rendered]}):
        derendered = await served.http.post(f"{COMPLETIONS}/derender", json=body | prompt)
        assert derendered.status_code == 200, derendered.text
        assert comparable(derendered.json()) == comparable(dict(expected))


async def test_without_the_request_the_text_is_the_content(serve: Serving) -> None:
    """Uses the shapes of older servers, whose log-probabilities have the ids as texts."""
    served = await serve()
    entry = {"token": "token_id:5", "logprob": -1.0, "bytes": None, "top_logprobs": []}
    choice = CHOICE | {"stop_reason": "END", "finish_reason": "stop", "logprobs": {"content": [entry, entry]}}
    response = {"request_id": "r-1", "choices": [choice], "prompt_logprobs": None, "kv_transfer_params": None}
    body = {"model": "tiny", "generate_response": response, "prompt_tokens": 7, "stream": False}
    answer = (await served.http.post(f"{CHAT}/derender", json=body)).json()
    text = served.tokenizer.decode([5, 6])
    assert (answer["id"], answer["choices"][0]["message"]["content"]) == ("r-1", text)
    assert [one["logprob"] for one in answer["choices"][0]["logprobs"]["content"]] == [-1.0, -1.0]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (7, 2)
    body = {"generate_responses": [response, response], "prompt_tokens": [3, 4]}
    answer = (await served.http.post(f"{COMPLETIONS}/derender", json=body)).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, text), (1, text)]
    assert answer["usage"]["prompt_tokens"] == 7
    assert served.engine.requests == []


async def test_incomplete_log_probabilities_are_taken_as_they_are(serve: Serving) -> None:
    served = await serve()
    entry = {"token_id": 6, "logprob": -1.0, "rank": 1, "top_logprobs": [{"token_id": 7, "logprob": -2.0}]}
    name = served.tokenizer.token_text
    for entries in ([], [entry], [entry] * 3):
        response = {"request_id": "r", "choices": [CHOICE | {"logprobs": {"content": entries}}]}
        chat = (await served.http.post(f"{CHAT}/derender", json={"generate_response": response})).json()
        (choice,) = chat["choices"]
        assert choice["message"]["content"] == served.tokenizer.decode([5, 6])
        assert [one["token"] for one in choice["logprobs"]["content"]] == [name(6)] * len(entries)
        answer = (await served.http.post(f"{COMPLETIONS}/derender", json={"generate_responses": [response]})).json()
        (choice,) = answer["choices"]
        assert choice["text"] == served.tokenizer.decode([5, 6])
        offsets = [number * len(name(6)) for number in range(len(entries))]
        assert (choice["logprobs"] or {"text_offset": []})["text_offset"] == offsets


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_text_ends_at_the_stop_string_that_ended_the_choice(serve: Serving, path: str) -> None:
    """Regression: the stop string, whose tokens an answer has, stayed in the text."""
    served = await serve()
    ids = fake_answer("one END two", eos=False)
    cases: list[tuple[dict[str, object], dict[str, object], str]] = [
        ({"stop_reason": "END"}, {}, "one "),
        ({}, {"stop": ["END"]}, "one "),
        ({}, {"stop": ["END"], "include_stop_str_in_output": True}, "one END"),
        ({}, {"stop": ["END"], "min_tokens": 99}, "one END two"),
        ({}, {}, "one END two"),
    ]
    for ended, request, text in cases:
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", **ended}
        response = {"request_id": "r", "choices": [choice]}
        chat = {"generate_response": response, "chat_request": {"messages": MESSAGES} | request}
        completion = {"generate_responses": [response], "completion_request": {"prompt": "x"} | request}
        answer = (await served.http.post(f"{path}/derender", json=chat if path == CHAT else completion)).json()
        (choice,) = answer["choices"]
        assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == text
        assert choice["stop_reason"] == ("END" if text.startswith("one ") and "two" not in text else None)


async def test_an_answer_with_parts_is_not_derendered_without_its_request(serve_tools: CallingServing) -> None:
    served = await serve_tools(saying("hi"))
    request = {"chat_request": {"messages": MESSAGES}}
    for body, param in (
        (wrong(), "chat_request"),
        (chunk_of(), "chat_request"),
        (chunk_of() | request, "prompt_token_ids"),
    ):
        assert_error(await served.http.post(f"{CHAT}/derender", json=body), status=400, param=param)


async def test_what_tokens_do_not_show_comes_from_the_generated_answer(serve: Serving) -> None:
    served = await serve()
    scored, params = [None, {"5": {"logprob": -1.5, "rank": 2, "decoded_token": "a"}}], {"node": "abc"}
    choices = [
        CHOICE | {"finish_reason": "stop", "stop_reason": "\n\n"},
        CHOICE | {"finish_reason": "stop", "index": 1, "stop_reason": 6},
        CHOICE | {"finish_reason": "stop", "index": 2},
    ]
    response = {"request_id": "r", "choices": choices, "prompt_logprobs": scored, "kv_transfer_params": params}
    chat = (await served.http.post(f"{CHAT}/derender", json={"generate_response": response})).json()
    text = served.tokenizer.decode([5, 6])
    assert [choice["stop_reason"] for choice in chat["choices"]] == ["\n\n", 6, None]
    assert [choice["message"]["content"] for choice in chat["choices"]] == [text, served.tokenizer.decode([5]), text]
    assert (chat["prompt_logprobs"], chat["kv_transfer_params"]) == (scored, params)
    body = {"generate_responses": [response], "prompt_token_ids": [[7, 8, 9]]}
    answer = (await served.http.post(f"{COMPLETIONS}/derender", json=body)).json()
    assert [choice["stop_reason"] for choice in answer["choices"]] == ["\n\n", 6, None]
    assert (answer["choices"][0]["prompt_logprobs"], answer["kv_transfer_params"]) == (scored, params)
    assert answer["usage"]["prompt_tokens"] == 3


async def test_the_log_probabilities_of_the_prompt_in_a_chunk_are_unchanged(served: Served) -> None:
    scored = [None, {"6": {"logprob": -1.0, "rank": 1, "decoded_token": "a"}}]
    body = chunk_of(prompt_logprobs=scored)
    chat = (await served.http.post(f"{CHAT}/derender", json=body)).json()["chunk"]
    (choice,) = (await served.http.post(f"{COMPLETIONS}/derender", json=body)).json()["chunk"]["choices"]
    assert (chat["prompt_logprobs"], choice["prompt_logprobs"]) == (scored, scored)


def wrong(**fields: object) -> dict[str, object]:
    return {"generate_response": {"request_id": "r", "choices": [CHOICE | fields]}}


def chunk_of(**fields: object) -> dict[str, object]:
    chunk = {"request_id": "r", "choices": [CHOICE | {"finish_reason": None}], **fields}
    return {"stream": True, "generate_chunk": chunk}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (CHAT, {}, 400, "generate_response"),
        (CHAT, {"generate_response": {"request_id": "r", "choices": []}}, 400, "generate_response.choices"),
        (CHAT, wrong(token_ids=[]), 400, "generate_response.choices[0].token_ids"),
        (CHAT, wrong(token_ids=None), 400, "generate_response.choices[0].token_ids"),
        (CHAT, wrong(token_ids=[9999]), 400, "token_ids"),
        (CHAT, wrong(token_ids=[5] * 5000), 400, "token_ids"),
        (CHAT, wrong(finish_reason="tired"), 400, "generate_response.choices[0].finish_reason"),
        (CHAT, wrong() | {"stream": True}, 400, "generate_chunk"),
        (CHAT, wrong() | {"stream_state": {}}, 400, "stream_state"),
        (COMPLETIONS, {"stream": True}, 400, "generate_chunk"),
        (COMPLETIONS, chunk_of(choices=[CHOICE] * 2), 400, "generate_chunk.choices"),
        (CHAT, chunk_of() | {"stream_state": {"prev_tokens": ["a"]}}, 400, "stream_state.prev_tokens"),
        (CHAT, chunk_of() | {"stream_state": {"output_token_ids": [9999]}}, 400, "stream_state"),
        (CHAT, chunk_of() | {"stream_state": {"output_token_ids": [5] * 4095}}, 400, "stream_state"),
        (CHAT, wrong() | {"model": "other"}, 404, "model"),
        (CHAT, {"generate_response": {"request_id": "r", "choices": [CHOICE] * 2}}, 400, "generate_response.choices"),
        (CHAT, wrong() | {"chat_request": {"messages": []}}, 400, "chat_request.messages"),
        (COMPLETIONS, {"generate_responses": []}, 400, "generate_responses"),
        (
            COMPLETIONS,
            {"generate_responses": [wrong()["generate_response"]], "prompt_tokens": [1, 2]},
            400,
            "prompt_tokens",
        ),
        (
            COMPLETIONS,
            {"generate_responses": [wrong()["generate_response"]], "prompt_token_ids": [[1], [2]]},
            400,
            "prompt_token_ids",
        ),
        (
            COMPLETIONS,
            {"generate_responses": [wrong(index=1)["generate_response"]]},
            400,
            "generate_responses[0].choices",
        ),
    ],
)
async def test_wrong_bodies_are_refused(
    served: Served, path: str, body: dict[str, object], status: int, param: str
) -> None:
    response: httpx.Response = await served.http.post(f"{path}/derender", json=body)
    assert_error(response, status=status, param=param)


async def test_clients_take_turns_while_a_long_answer_is_read(
    serve_tools: CallingServing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: an answer of a million tokens was one piece of work, and others waited 2 s for the thread."""
    monkeypatch.setattr(derender, "PIECE_TOKENS", 100)
    pieces: list[int] = []
    read = DerenderedAnswer.read

    async def in_thread_if_long(_: Caller, work: Callable[[], T], size: int | None = None) -> T:
        pieces.append(0)
        return work()

    def counted(self: DerenderedAnswer, number: int, choice: GeneratedChoice) -> None:
        pieces[-1] += len(choice.token_ids)
        read(self, number, choice)

    monkeypatch.setattr(Caller, "in_thread_if_long", in_thread_if_long)
    monkeypatch.setattr(DerenderedAnswer, "read", counted)
    served = await serve_tools(saying("hi"), reasoning=None)
    choices = [{"index": number, "token_ids": [5] * 30, "finish_reason": "length"} for number in range(9)]
    body = {"generate_response": {"request_id": "a", "choices": choices}}
    answer = (await served.http.post(f"{CHAT}/derender", json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [*range(9)]
    assert answer["usage"]["completion_tokens"] == 270
    assert [size for size in pieces if size] == [60, 60, 60, 60, 30]
