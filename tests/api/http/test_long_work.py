"""Work on long bodies is done in one thread, in which clients take turns, and never on the event loop."""

import asyncio
import gc
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from motet.api.http.body import MAX_CONTAINERS, MAX_LEVELS, MAX_MEMBERS, check_json_strings
from motet.api.http.caller import Caller
from motet.api.http.failure import FieldError
from motet.api.http.long_work import LONG_WORK, WorkThread, in_thread, in_thread_of, work_client, work_size
from motet.api.http.schema import MAX_VALUES
from motet.api.openai.chat_schema import Message
from motet.errors import RequestError
from motet.grammar.limits import EXPANDED_KEYWORDS
from motet.text.prepare import PromptPreparer
from tests.api.calling import CallingServing
from tests.api.serving import Served, Serving, hello
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.anyio

MANY = 200
"""Number of short parts that make a body long."""
MESSAGE = {"role": "user", "content": "hi"}
LONG = "x" * LONG_WORK


def calls(arguments: object, *, times: int = 1) -> dict[str, object]:
    """Returns a message with calls."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call] * times}


def items(arguments: str, *, times: int = 1) -> list[object]:
    """Returns the input of a Response with calls."""
    return [{"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}] * times


def uses(arguments: object, *, times: int = 1) -> list[object]:
    """Returns the messages of `/v1/messages` with calls."""
    block = {"type": "tool_use", "id": "1", "name": "f", "input": arguments}
    return [MESSAGE, {"role": "assistant", "content": [block] * times}, MESSAGE]


async def test_clients_take_turns_and_each_keeps_the_order_of_its_pieces() -> None:
    thread, order = WorkThread(), list[str]()

    async def piece(name: str) -> None:
        async with thread.turn(name[0]):
            order.append(name)
            await asyncio.sleep(0)

    await asyncio.gather(*map(piece, ("a1", "a2", "a3", "b1", "c1", "b2")))
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_a_cancelled_piece_is_skipped_also_if_its_turn_has_come() -> None:
    thread, order = WorkThread(), list[str]()

    async def piece(name: str) -> None:
        async with thread.turn(name):
            order.append(name)

    async with thread.turn("first"):
        waiting, next_one, last = [asyncio.create_task(piece(name)) for name in ("waiting", "next", "last")]
        await asyncio.sleep(0)
        waiting.cancel()
    next_one.cancel()  # it has got the turn, and has not run
    await asyncio.wait([waiting, next_one, last])
    await piece("later")
    assert order == ["last", "later"]


async def test_a_client_with_one_long_prompt_waits_for_one_piece_of_another_client(
    serve: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serve(api_keys=("one", "two"))
    queued, go, order = asyncio.Semaphore(0), threading.Event(), list[str]()
    text_prompt, in_thread_if_long = PromptPreparer.text_prompt, Caller.in_thread_if_long

    def noted(self: PromptPreparer, text: str, *arguments: Any, **keywords: Any) -> list[int]:
        go.wait()
        order.append(text.split()[0])
        return text_prompt(self, text, *arguments, **keywords)

    async def counted(self: Caller, *arguments: Any) -> object:
        queued.release()
        return await in_thread_if_long(self, *arguments)

    monkeypatch.setattr(PromptPreparer, "text_prompt", noted)
    monkeypatch.setattr(Caller, "in_thread_if_long", counted)
    tasks = []
    for name, key in (("one-0", "one"), ("one-1", "one"), ("one-2", "one"), ("two-0", "two")):
        request = served.http.post(
            "/v1/completions",
            json={"prompt": f"{name} {LONG}", "max_tokens": 1},
            headers={"authorization": f"Bearer {key}"},
        )
        tasks.append(asyncio.create_task(request))
        await queued.acquire()
    go.set()
    await asyncio.gather(*tasks)
    assert order == ["one-0", "two-0", "one-1", "one-2"]


@pytest.mark.parametrize(
    ("key", "salt", "client"), [("key-1", "salt", "key-1"), ("", "salt", "salt"), ("", "", "10.0.0.1")]
)
def test_the_client_is_the_key_or_the_salt_or_the_address(key: str, salt: str, client: str) -> None:
    scope = {"state": {"client": key} if key else {}, "client": ("10.0.0.1", 5000)}
    assert work_client(scope, salt) == client


CASES: dict[str, tuple[str, dict[str, object]]] = {
    "a text": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    "a long argument": ("/v1/chat/completions", {"messages": [calls(json.dumps({"a": LONG})), MESSAGE]}),
    "lists in an argument": ("/v1/chat/completions", {"messages": [calls('{"a":[' + "[]," * MANY + "[]]}"), MESSAGE]}),
    "arguments as an object": ("/v1/chat/completions", {"messages": [calls({"a": [[]] * MANY}), MESSAGE]}),
    "many calls": ("/v1/chat/completions", {"messages": [calls("{}", times=MANY), MESSAGE]}),
    "reasoning": (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "content": "x", "reasoning_content": LONG}, MESSAGE]},
    ),
    "variables": ("/v1/chat/completions", {"messages": [MESSAGE], "chat_template_kwargs": {"a": [[]] * MANY}}),
    "a chat, rendered": ("/v1/chat/completions/render", {"messages": [calls(json.dumps({"a": LONG})), MESSAGE]}),
    "a chat, tokenised": ("/tokenize", {"messages": [calls(json.dumps({"a": LONG})), MESSAGE]}),
    "a text, tokenised": ("/tokenize", {"prompt": LONG}),
    "a response": ("/v1/responses", {"input": [*items(json.dumps({"a": LONG})), MESSAGE]}),
    "a response of many calls": ("/v1/responses", {"input": [*items("{}", times=MANY), MESSAGE]}),
    "a response, counted": ("/v1/responses/input_tokens", {"input": [*items(json.dumps({"a": LONG})), MESSAGE]}),
    "a message": ("/v1/messages", {"messages": uses({"a": LONG}), "max_tokens": 1}),
    "a message of many calls": ("/v1/messages", {"messages": uses({}, times=MANY), "max_tokens": 1}),
    "a message, counted": ("/v1/messages/count_tokens", {"messages": uses({"a": LONG})}),
    "a completion": ("/v1/completions", {"prompt": LONG}),
    "many completions": ("/v1/completions", {"prompt": ["x" * 50] * MANY}),
    "SGLang's text": ("/generate", {"text": LONG}),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_long_body_is_rendered_and_tokenised_in_the_thread(
    serve_tools: CallingServing, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    threads: list[threading.Thread] = []
    original = PromptPreparer.text_prompt

    def noted(self: PromptPreparer, text: str, *arguments: Any, **keywords: Any) -> list[int]:
        threads.append(threading.current_thread())
        return original(self, text, *arguments, **keywords)

    monkeypatch.setattr(PromptPreparer, "text_prompt", noted)
    served = await serve_tools(hello)
    path, body = CASES[case]
    await served.http.post(path, json=body)
    assert threads
    assert threading.main_thread() not in threads
    threads.clear()
    short: dict[str, object] = {name: "hi" for name in ("prompt", "text") if name in body}
    await served.http.post(path, json={**body, **(short or {"input" if "input" in body else "messages": [MESSAGE]})})
    assert threads == [threading.main_thread()] or case == "variables"


MAXIMA: dict[str, tuple[Callable[[int], str], int, str]] = {
    "objects and arrays": (lambda count: f'{{"a":[{"[]," * (count - 3)}[]]}}', MAX_CONTAINERS, "objects and arrays"),
    "levels": (lambda count: f'{{"a":{"[" * (count - 1)}{"]" * (count - 1)}}}', MAX_LEVELS, "levels"),
    "values": (lambda count: f'{{"a":[{"1," * count}1]}}', MAX_VALUES, "values"),
    "members": (
        lambda count: f"{{{','.join(f'{chr(34)}{n}{chr(34)}:1' for n in range(count))}}}",
        MAX_MEMBERS,
        "members",
    ),
    "digits": (lambda count: f'{{"a":{"9" * count},"b":{json.dumps(LONG * 8)}}}', 100, "digits in a number"),
    "long numbers": (lambda count: f'{{"a":[{f"{10**20}," * (count - 1)}{10**20}]}}', 10_000, "numbers with more than"),
}


@pytest.mark.parametrize("kind", MAXIMA)
def test_json_in_a_string_has_the_limits_of_a_body(kind: str) -> None:
    make, limit, words = MAXIMA[kind]
    others = {"before": '"[[[{{,', "after": '"\\\\,[\\""'}
    check_json_strings({"field": make(limit), **others})
    with pytest.raises(FieldError) as raised:
        check_json_strings({"before": others["before"], "field": make(limit + 1), "after": others["after"]})
    error = raised.value.at(())
    assert error.param == "field"
    assert f"JSON in strings can have at most {limit} {words}" in error.message


def test_the_limits_count_the_json_in_all_strings_together() -> None:
    half = '{"a":[' + "[]," * (MAX_CONTAINERS // 2) + "[]]}"
    check_json_strings({"one": half})
    with pytest.raises(FieldError) as raised:
        check_json_strings({"one": half, "two": half, "three": "{}"})
    assert raised.value.at(()).param == "two"


async def test_arguments_with_too_many_parts_are_refused_on_every_route(serve_tools: CallingServing) -> None:
    served, arguments = await serve_tools(hello), '{"a":[' + "[]," * MAX_CONTAINERS + "[]]}"
    chat = {"messages": [MESSAGE, calls("{}"), calls(arguments), MESSAGE]}
    field = "messages[2].tool_calls[0].function.arguments"
    for path in ("/v1/chat/completions", "/v1/chat/completions/render", "/tokenize"):
        error = (await served.http.post(path, json=chat)).json()["error"]
        assert (error["param"], error["code"]) == (field, "invalid_value")
        assert error["message"] == (
            f"Invalid '{field}': JSON in strings can have at most {MAX_CONTAINERS} objects and arrays in one request."
        )
    response = await served.http.post("/v1/responses", json={"input": [*items(arguments), MESSAGE]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input")


async def test_no_garbage_is_collected_while_long_work_runs() -> None:
    assert not await in_thread(gc.isenabled, client="a")
    assert not await in_thread_of(WorkThread(), gc.isenabled, client="a")
    assert gc.isenabled()


@pytest.mark.slow
async def test_the_objects_of_a_refused_body_are_freed_without_a_collection(served: Served) -> None:
    """A collection that finds them would delay the streams."""

    def num_messages() -> int:
        return sum(isinstance(found, Message) for found in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = num_messages()  # of earlier tests
        body = {"input": [{"role": "user", "content": LONG}] * 2}
        assert (await served.http.post("/v1/responses", json=body)).status_code == 400
        async with asyncio.timeout(PATIENCE_S):
            while num_messages() != before:  # until the request and the thread have let go of them
                await served.http.get("/version")
    finally:
        gc.enable()


async def test_an_error_in_the_thread_lets_the_next_piece_run() -> None:
    def fail() -> None:
        raise RequestError("no")

    with pytest.raises(RequestError):
        await in_thread(fail, client="a")
    assert await in_thread(threading.current_thread, client="a") is not threading.main_thread()


PLAIN = [each.strip('"').replace("dependent", "dependentRequired") for each in EXPANDED_KEYWORDS]


@pytest.mark.parametrize("keyword", [*PLAIN, r"n\u006ft"])
def test_a_schema_whose_keywords_are_replaced_is_long_work(keyword: str) -> None:
    schema = f'{{"schema":{{"{keyword}":{{}}}}}}'
    assert work_size(schema.encode()) > LONG_WORK
    assert work_size(json.dumps({"guided_json": schema}).encode()) > LONG_WORK
    assert work_size(b'{"messages":[{"role":"user","content":"is it not so if it is \\u00fc?"}]}') < LONG_WORK
