"""`POST /v1/messages` through Anthropic's official client and over raw HTTP."""

import json
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from motet.errors import EngineDiedError, EngineError, OverloadedError
from tests.api.messaging import MAX_TOKENS, checked_error, final, plain, post, streamed, texts, unstreamed
from tests.api.serving import MODEL, Served, Serving, WatchedEngine, saying
from tests.error_response import assert_error
from tests.tiny_tokenizer import fake_answer

pytestmark = pytest.mark.anyio

TURNS: list[Any] = [{"role": "user", "content": "hi"}]


async def test_official_client_reads_the_answer(served: Served) -> None:
    message = await served.anthropic.messages.create(model=MODEL, max_tokens=50, messages=TURNS)
    (block,) = message.content
    assert block.type == "text"
    assert block.text == "hello 0"
    assert (message.role, message.type, message.model) == ("assistant", "message", MODEL)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_")
    assert message.usage.input_tokens == len(served.engine.requests[0].prompt)
    assert message.usage.output_tokens == len(fake_answer("hello 0"))


async def test_stream_of_the_official_client_leads_to_the_answer(serve: Serving) -> None:
    served = await serve(saying("héllo wörld 日本語"))
    async with served.anthropic.messages.stream(model=MODEL, max_tokens=50, messages=TURNS) as stream:
        pieces = [piece async for piece in stream.text_stream]
        message = await stream.get_final_message()
    assert "".join(pieces) == texts(message) == "héllo wörld 日本語"
    assert len(pieces) > 3
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == len(fake_answer("héllo wörld 日本語"))


async def test_answer_is_that_of_the_same_chat(served: Served) -> None:
    chat = await served.chat(
        messages=[{"role": "system", "content": "be short"}, *TURNS],
        max_tokens=9,
        seed=5,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stop=["END"],
    )
    message = await served.anthropic.messages.create(
        model=MODEL,
        system="be short",
        messages=TURNS,
        max_tokens=9,
        stop_sequences=["END"],
        extra_body={"seed": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 7},
    )
    assert texts(message) == chat.json()["choices"][0]["message"]["content"]
    of_chat, of_message = served.engine.requests
    assert of_message.prompt == of_chat.prompt
    assert of_message.sampling == of_chat.sampling
    assert of_message.choices == of_chat.choices


async def test_streamed_message_is_the_unstreamed_message(serve: Serving) -> None:
    served = await serve(saying("héllo wörld 日本語"))
    events = streamed(await post(served, stream=True))
    assert plain(final(events)) == plain(unstreamed(await post(served)))
    assert [event.type for event in events if event.type != "content_block_delta"] == [
        *("message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop")
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_text_has_no_block(serve: Serving, stream: bool) -> None:
    served = await serve(saying(""))
    response = await post(served, stream=stream)
    message = final(streamed(response)) if stream else unstreamed(response)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "end_turn", 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "reason", "sequence"),
    [
        ({}, "one END two", "end_turn", None),
        ({"max_tokens": 3}, "one", "max_tokens", None),
        ({"stop_sequences": ["no", "END"]}, "one ", "stop_sequence", "END"),
        ({"stop_token_ids": fake_answer("E", eos=False)}, "one ", "end_turn", None),
    ],
)
async def test_the_reason_of_the_end_has_anthropics_name(
    serve: Serving, fields: dict[str, object], text: str, reason: str, sequence: str | None, stream: bool
) -> None:
    served = await serve(saying("one END two"))
    response = await post(served, **fields, stream=stream)
    message = final(streamed(response)) if stream else unstreamed(response)
    assert (texts(message), message.stop_reason, message.stop_sequence) == (text, reason, sequence)


async def test_a_turn_of_the_assistant_at_the_end_is_continued(served: Served) -> None:
    turns = [*TURNS, {"role": "assistant", "content": "I say"}]
    unstreamed(await post(served, turns))
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert (await served.chat(messages=turns, **fields)).status_code == 200
    of_message, of_chat = served.engine.requests
    assert of_message.prompt == of_chat.prompt
    assert served.prompt.endswith("I say")


@pytest.mark.parametrize("content", ["", " \n"])
async def test_an_empty_turn_of_the_assistant_is_continued_like_a_new_one(served: Served, content: str) -> None:
    unstreamed(await post(served, [*TURNS, {"role": "assistant", "content": content}]))
    unstreamed(await post(served, TURNS))
    continued, new = served.engine.requests
    assert continued.prompt[: len(new.prompt)] == new.prompt


BILLING = "x-anthropic-billing-header: cc_version=2.1.332.{0}; cc_entrypoint=cli; cch={0};"
RULES = "You are a coding agent."


@pytest.mark.parametrize(
    "system",
    [
        [{"type": "text", "text": BILLING}, {"type": "text", "text": RULES}],
        f"{BILLING}\n{RULES}",
        [{"type": "text", "text": f"{BILLING}\nx-anthropic-more: 1\n{RULES}"}],
    ],
    ids=["block", "string", "lines"],
)
async def test_lines_of_claude_code_that_change_are_not_in_the_prompt(served: Served, system: object) -> None:
    """Claude Code's first block has a new hash in each request, so that no prompt would share a cached prefix."""
    for value in ("3c7", "9a1"):
        unstreamed(await post(served, TURNS, system=json.loads(json.dumps(system).replace("{0}", value))))
    unstreamed(await post(served, TURNS, system=RULES))
    first, second, plain = (request.prompt for request in served.engine.requests)
    assert first == second == plain


async def test_a_system_prompt_with_nothing_but_such_a_line_is_omitted(served: Served) -> None:
    unstreamed(await post(served, TURNS, system=BILLING))
    unstreamed(await post(served, TURNS))
    with_line, without = served.engine.requests
    assert with_line.prompt == without.prompt


async def test_a_user_can_ask_about_such_a_line(served: Served) -> None:
    line = BILLING.format("3c7")
    unstreamed(await post(served, line, system=f"{RULES}\n{line}"))
    assert served.prompt.count(line) == 2


async def test_an_answer_can_be_sent_back_unchanged(served: Served) -> None:
    first = await served.anthropic.messages.create(model=MODEL, max_tokens=50, messages=TURNS)
    again = [*TURNS, first.to_param(), {"role": "user", "content": "and?"}]
    await served.anthropic.messages.create(model=MODEL, max_tokens=50, messages=again)
    assert "<|im_start|>assistant\nhello 0<|im_end|>\n<|im_start|>user\nand?<|im_end|>" in served.prompt


async def test_tokens_are_counted_as_the_answer_counts_them(served: Served) -> None:
    system: list[Any] = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    counted = await served.anthropic.messages.count_tokens(model=MODEL, messages=TURNS, system=system)
    message = await served.anthropic.messages.create(model=MODEL, max_tokens=5, messages=TURNS, system=system)
    assert counted.input_tokens == message.usage.input_tokens
    refused = checked_error(await served.http.post("/v1/messages/count_tokens", json={"messages": [1]}))
    assert_error(refused, status=400, type="invalid_request_error")
    assert "'messages[0]'" in refused.json()["error"]["message"]


async def test_fields_without_an_effect_are_accepted(served: Served) -> None:
    response = await post(
        served,
        [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}],
        metadata={"user_id": "me"},
        cache_control={"type": "ephemeral", "ttl": "1h"},
        service_tier="auto",
        speed="standard",
        mcp_servers=[],
        container=None,
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        n=1,
    )
    assert texts(unstreamed(response)) == "hello 0"


async def test_the_id_of_the_request_is_under_both_names(served: Served) -> None:
    for path, has_header in (("/v1/messages", True), ("/v1/chat/completions", False)):
        body = {"messages": TURNS, "max_tokens": 5}
        headers = (await served.http.post(path, json=body, headers={"x-request-id": "mine"})).headers
        assert headers["x-request-id"] == "mine"
        assert headers.get("request-id") == ("mine" if has_header else None)


async def test_clients_of_beta_features_use_the_same_route(served: Served) -> None:
    message = await served.anthropic.beta.messages.create(
        model=MODEL, max_tokens=50, messages=TURNS, betas=["interleaved-thinking-2025-05-14"]
    )
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "hello 0"}]


class Weather(BaseModel):
    city: str
    degrees: int


ANSWER = '{"city": "Paris", "degrees": 21}'


async def test_answer_is_parsed_by_the_client(serve: Serving) -> None:
    served = await serve(saying(ANSWER))
    message = await served.anthropic.messages.parse(model=MODEL, max_tokens=200, messages=TURNS, output_format=Weather)
    assert message.parsed_output == Weather(city="Paris", degrees=21)
    assert served.engine.requests[0].sampling.grammar is not None


async def test_a_format_is_the_same_form_as_in_a_chat(serve: Serving) -> None:
    served, schema = await serve(saying(ANSWER)), Weather.model_json_schema()
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    unstreamed(await post(served, output_config={"format": {"type": "json_schema", "schema": schema}}))
    assert (await served.chat(response_format=form, max_tokens=MAX_TOKENS)).status_code == 200
    of_message, of_chat = served.engine.requests
    assert of_message.sampling == of_chat.sampling
    assert of_message.sampling.grammar is not None


async def test_error_before_the_first_token_keeps_its_status(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(fail_after={0: EngineDiedError("the engine is gone")}))
    response = checked_error(await post(served, stream=True))
    assert_error(response, status=503, type="api_error", message="the engine is gone")


async def test_a_busy_server_is_overloaded(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(fail_after={0: OverloadedError("no capacity")}))
    response = checked_error(await post(served))
    assert_error(response, status=503, type="overloaded_error", message="no capacity", retry_after="1")
    with pytest.raises(anthropic.InternalServerError, match="no capacity"):
        await served.anthropic.messages.create(model=MODEL, max_tokens=5, messages=TURNS)


async def test_error_after_the_first_token_is_an_event(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(fail_after={2: EngineError("the engine broke")}))
    response = await post(served, stream=True)
    *_, last, rest = response.text.split("\n\n")
    assert rest == ""
    name, data = last.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {
        "type": "error",
        "error": {"type": "api_error", "message": "the engine broke"},
        "request_id": response.headers["request-id"],
    }
    with pytest.raises(anthropic.APIStatusError, match="the engine broke"):
        async with served.anthropic.messages.stream(model=MODEL, max_tokens=50, messages=TURNS) as stream:
            await stream.get_final_message()


async def test_all_events_of_a_step_are_one_message(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(saying("a"), gated=True))
    served.engine.steps.release()
    body = {"messages": TURNS, "max_tokens": 5, "stream": True}
    async with served.http.stream("POST", "/v1/messages", json=body) as response:
        pieces = response.aiter_raw()
        first = await anext(pieces)
        assert first.count(b"event: ") == 4  # the message, a ping, a block, its first delta
        served.engine.steps.release()
        rest = b"".join([piece async for piece in pieces])
    assert rest.count(b"event: ") == 3  # the end of the block, the stop reason, the end of the message


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_group(serve: Serving, stream: bool) -> None:
    served = await serve(engine=WatchedEngine(gated=True))
    request = await served.engine.start_request(post(served, stream=stream))
    served.engine.steps.release()
    await served.abandon(request)
