"""The chunks of a generated answer, derendered one by one, join to the derendered answer."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.api.calling import PARIS, CallingServing
from tests.api.serving import Served, Serving, saying
from tests.api.vllm.test_derender import CHAT, COMPLETIONS, MESSAGES, TOOLS, chunk_of, comparable, generated

pytestmark = pytest.mark.anyio


async def streamed(
    served: Served, path: str, body: dict[str, Any], *, choice: dict[str, Any], sizes: Sequence[int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Sends a generated choice in chunks with these numbers of tokens. Returns the chunks' choices, and the states."""
    chunks, states, place = list[dict[str, Any]](), list[dict[str, Any]](), 0
    for number, size in enumerate(sizes):
        part = choice | {"token_ids": choice["token_ids"][place : place + size]}
        if choice.get("logprobs"):
            part["logprobs"] = {"content": choice["logprobs"]["content"][place : place + size]}
        if number < len(sizes) - 1:
            part |= {"finish_reason": None, "stop_reason": None}
        place += size
        state = {"stream_state": states[-1] if states else None}
        sent = body | {"stream": True, "generate_chunk": {"request_id": "r", "choices": [part]}} | state
        answer = await served.http.post(f"{path}/derender", json=sent)
        assert answer.status_code == 200, answer.text
        states.append(answer.json()["stream_state"])
        chunks += answer.json()["chunk"]["choices"]
    return chunks, states


def assembled(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the message and the end of a choice, without the ids of its calls."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for delta in (one["delta"] for one in chunks):
        for name in ("content", "reasoning", "reasoning_content"):
            message |= {name: message.get(name, "") + delta[name]} if delta.get(name) else {}
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                calls.append({"type": "function", "function": {"name": call["function"]["name"], "arguments": ""}})
            calls[call["index"]]["function"]["arguments"] += call["function"].get("arguments", "")
    ends = [one["finish_reason"] for one in chunks if one["finish_reason"]]
    return {
        "message": message | ({"content": message["content"] or None} if "tool_calls" in message else {}),
        "ends": ends,
    }


def sizes_of(length: int, step: int = 3) -> list[list[int]]:
    """Returns chunks of all tokens, of some tokens, and with an end without tokens."""
    return [[length], [step] * (length // step) + [length % step], [length, 0]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": TOOLS, "return_token_ids": True},
        {"tools": TOOLS, "tool_choice": "required"},
        {"include_reasoning": False, "logprobs": True, "return_token_ids": True},
        {"stop": ["rain"], "logprobs": True, "top_logprobs": 1},
    ],
)
async def test_streamed_chunks_of_any_size_join_to_the_derendered_chat(
    serve_tools: CallingServing, fields: dict[str, Any]
) -> None:
    answers = PARIS, "It rains. 日本 😀", f"<think>Where? 日本</think>{PARIS}"
    served = await serve_tools(saying(*answers))
    request = {"messages": MESSAGES, "seed": 3, "n": len(answers), **fields}
    rendered = (await served.http.post(f"{CHAT}/render", json=request)).json()
    response = await generated(served, rendered)
    prompt = {"prompt_token_ids": rendered["token_ids"], "chat_request": request}
    whole = (await served.http.post(f"{CHAT}/derender", json=prompt | {"generate_response": response})).json()
    for choice, other in zip(response["choices"], comparable(whole)["choices"], strict=True):
        for sizes in sizes_of(len(choice["token_ids"]), 2 if not fields else 5):
            received, _ = await streamed(served, CHAT, prompt, choice=choice, sizes=sizes)
            expected = {name: value for name, value in other["message"].items() if name != "refusal"}
            assert assembled(received) == {"message": expected, "ends": [other["finish_reason"]]}
            assert [one["delta"].get("role") for one in received] == ["assistant"] + [None] * (len(sizes) - 1)
            assert next(one["stop_reason"] for one in received if one["finish_reason"]) == other["stop_reason"]
            ids = [token for one in received for token in one.get("token_ids", ())]
            assert ids == (other["token_ids"] or [])
            entries = [entry for one in received if one["logprobs"] for entry in one["logprobs"]["content"]]
            assert entries == (other["logprobs"] or {"content": []})["content"]


@pytest.mark.slow
async def test_streamed_chunks_of_any_size_join_to_the_derendered_completion(serve: Serving) -> None:
    """A plain text needs only the last tokens, however long the answer is."""
    served = await serve(saying("It rains. 日本 😀 " * 12 + "end"))
    (rendered,) = (await served.http.post(f"{COMPLETIONS}/render", json={"prompt": "x", "logprobs": 1})).json()
    rendered["sampling_params"]["max_tokens"] = 400
    response = await generated(served, rendered)
    whole = (await served.http.post(f"{COMPLETIONS}/derender", json={"generate_responses": [response]})).json()
    (expected,), (choice,) = whole["choices"], response["choices"]
    for sizes in sizes_of(len(choice["token_ids"]), 7):
        received, states = await streamed(served, COMPLETIONS, {}, choice=choice, sizes=sizes)
        assert "".join(one["text"] for one in received) == expected["text"]
        assert received[-1]["finish_reason"] == expected["finish_reason"]
        for name, values in expected["logprobs"].items():
            assert [value for one in received for value in (one["logprobs"] or {}).get(name, ())] == values
        assert len(states[-1]["output_token_ids"]) < len(choice["token_ids"])


async def test_a_chunk_with_the_usage_has_no_choice(serve: Serving) -> None:
    served = await serve()
    usage = {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    for path, prompt_tokens in ((CHAT, 7), (COMPLETIONS, 7), (CHAT, None)):
        body = chunk_of(choices=[], usage=usage) | {"prompt_tokens": prompt_tokens}
        answer = (await served.http.post(f"{path}/derender", json=body)).json()
        assert answer["chunk"]["choices"] == []
        assert answer["chunk"]["usage"]["prompt_tokens"] == (prompt_tokens or 4)
        assert answer["chunk"]["usage"]["completion_tokens"] == 6
        assert not answer["stream_state"]["role_sent"]
