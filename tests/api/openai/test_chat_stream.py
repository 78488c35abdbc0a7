"""Streamed chats: the order and the content of chunks, and the end of a stream."""

from collections import defaultdict

import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from motet.errors import EngineDiedError, EngineError, RequestError
from tests.api.serving import MODEL, Served, Serving, WatchedEngine, chunks, events, saying
from tests.error_response import assert_error
from tests.tiny_tokenizer import fake_answer

pytestmark = pytest.mark.anyio

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


async def stream(served: Served, n: int) -> list[ChatCompletionChunk]:
    return [
        chunk async for chunk in await served.openai.chat.completions.create(model=MODEL, messages=HI, n=n, stream=True)
    ]


async def test_streamed_texts_equal_the_unstreamed_answer(serve: Serving) -> None:
    served = await serve(saying("héllo wörld", "and the other", "日本語 text"))
    unstreamed = await served.openai.chat.completions.create(model=MODEL, messages=HI, n=3)
    texts: dict[int, str] = defaultdict(str)
    for chunk in await stream(served, 3):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [texts[i] for i in range(3)] == [choice.message.content for choice in unstreamed.choices]


async def test_every_choice_starts_with_its_role_and_a_chunk_has_one_choice(served: Served) -> None:
    received = await stream(served, 3)
    assert [chunk.choices[0].index for chunk in received[:3]] == [0, 1, 2]
    assert [chunk.choices[0].delta.role for chunk in received[:3]] == ["assistant"] * 3
    assert {chunk.choices[0].delta.role for chunk in received[3:]} == {None}
    assert {len(chunk.choices) for chunk in received} == {1}


async def test_all_chunks_of_an_answer_share_id_created_model_and_fingerprint(served: Served) -> None:
    received = await stream(served, 2)
    assert len({(c.id, c.created, c.model, c.object, c.system_fingerprint) for c in received}) == 1
    assert received[0].object == "chat.completion.chunk"
    assert received[0].system_fingerprint == served.engine.info.fingerprint


async def test_each_choice_has_one_finish_reason_and_nothing_after_it(serve: Serving) -> None:
    served = await serve(saying("a", "a longer answer"))
    ended: list[int] = []
    for chunk in await stream(served, 2):
        choice = chunk.choices[0]
        assert choice.index not in ended
        if choice.finish_reason is not None:
            ended.append(choice.index)
    assert ended == [0, 1]  # the short choice does not wait for the long one


@pytest.mark.parametrize("fields", [{}, {"logprobs": True}, {"return_token_ids": True}, {"tools": [TOOL]}])
async def test_the_chunk_with_the_finish_reason_has_no_text(serve: Serving, fields: dict[str, object]) -> None:
    """A choice that ended with `length`, or whose last text was held back, had its last text in this chunk."""
    served = await serve(saying("one EN"))
    for limits in ({"max_tokens": 3}, {"stop": "END"}, {"max_tokens": 6, "stop": "END"}):
        whole = (await served.chat(**fields, **limits)).json()["choices"][0]["message"]["content"]
        *before, last = chunks(await served.chat(stream=True, **fields, **limits))
        assert last["choices"][0]["finish_reason"] is not None
        assert not last["choices"][0]["delta"].get("content")
        assert not any(chunk["choices"][0]["finish_reason"] for chunk in before)
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in before) == whole


async def test_include_usage_adds_one_chunk_without_choices_and_nulls_before(served: Served) -> None:
    *others, last = chunks(await served.chat(stream=True, n=2, stream_options={"include_usage": True}))
    assert [chunk["usage"] for chunk in others] == [None] * len(others)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": len(served.engine.requests[0].prompt),
        "completion_tokens": 2 * len(fake_answer("hello 0")),
        "total_tokens": len(served.engine.requests[0].prompt) + 2 * len(fake_answer("hello 0")),
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_continuous_usage_is_the_running_total_of_the_request(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    received = chunks(await served.chat(stream=True, n=2, stream_options=options))
    totals = [chunk["usage"]["completion_tokens"] for chunk in received]
    assert totals == sorted(totals)
    assert totals[:4] == [0, 0, 1, 2]  # two role chunks, then a token of each choice
    assert totals[-1] == totals[-2] == 2 * len(fake_answer("hello 0"))


async def test_continuous_usage_counts_what_has_been_sent_and_not_what_is_held_back(serve: Serving) -> None:
    """The role chunk used to count the tokens of its step, and every chunk the tokens whose text was held back."""
    served = await serve(saying("one EN and END"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    for answer in (
        await served.chat(stream=True, stop="END", return_token_ids=True, stream_options=options),
        await served.complete(stream=True, stop="END", return_token_ids=True, stream_options=options, max_tokens=50),
    ):
        *parts, last = chunks(answer)
        sent = 0
        for chunk in parts:
            sent += len(chunk["choices"][0].get("token_ids", ()))
            assert chunk["usage"]["completion_tokens"] == sent
        assert last["usage"] == parts[-1]["usage"]


async def test_without_include_usage_no_chunk_has_usage(served: Served) -> None:
    received = chunks(await served.chat(stream=True, stream_options={"continuous_usage_stats": True}))
    assert all("usage" not in chunk for chunk in received)


async def test_token_ids_of_a_stream_join_to_the_answer(served: Served) -> None:
    received = chunks(await served.chat(stream=True, n=2, return_token_ids=True))
    ids: dict[int, list[int]] = defaultdict(list)
    for chunk in received:
        ids[chunk["choices"][0]["index"]].extend(chunk["choices"][0].get("token_ids", []))
    assert ids == {0: fake_answer("hello 0"), 1: fake_answer("hello 1")}
    assert received[0]["prompt_token_ids"] == list(served.engine.requests[0].prompt)
    assert "prompt_token_ids" not in received[2]


async def test_logprobs_of_a_stream_join_to_the_unstreamed_logprobs(served: Served) -> None:
    unstreamed = (await served.chat(logprobs=True, top_logprobs=1)).json()["choices"][0]["logprobs"]["content"]
    received = chunks(await served.chat(logprobs=True, top_logprobs=1, stream=True))
    parts = [chunk["choices"][0]["logprobs"] for chunk in received]
    assert [entry for part in parts if part for entry in part["content"]] == unstreamed


async def test_stop_string_is_held_back_and_named_at_the_end(serve: Serving) -> None:
    served = await serve(saying("one END two"))
    received = chunks(await served.chat(stream=True, stop="END"))
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in received) == "one "
    assert received[-1]["choices"][0]["finish_reason"] == "stop"
    assert received[-1]["choices"][0]["stop_reason"] == "END"


@pytest.mark.parametrize(
    "error", [EngineDiedError("the engine is gone"), RequestError("too big for the cache", param="n", code="too_big")]
)
async def test_error_before_the_first_token_keeps_its_status(
    serve: Serving, error: EngineDiedError | RequestError
) -> None:
    served = await serve(engine=WatchedEngine(fail_after={0: error}))
    assert_error(await served.chat(stream=True), status=error.status, code=error.code)


async def test_error_after_the_first_byte_is_an_event_and_then_done(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(fail_after={3: EngineError("the engine broke")}))
    response = await served.chat(stream=True)
    assert response.status_code == 200
    *_, failure, done = events(response)
    assert done == "[DONE]"
    assert failure == (
        '{"error":{"message":"the engine broke","type":"server_error","param":null,"code":"engine_error"}}'
    )


async def test_a_bug_after_the_first_byte_ends_the_stream_without_details(serve: Serving) -> None:
    def broken(request: object, start: object) -> list[int]:
        raise_at.append(0)
        if len(raise_at) > 1:
            raise ZeroDivisionError("secret")
        return fake_answer("hello")

    raise_at: list[int] = []
    served = await serve(broken)
    response = await served.chat(stream=True)
    *_, failure, done = events(response)
    assert done == "[DONE]"
    assert "internal_error" in failure
    assert "secret" not in failure
