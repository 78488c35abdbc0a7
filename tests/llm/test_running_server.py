"""`LLM` and `AsyncLLM` with a running server, whose engine is scripted."""

import asyncio
import copy
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from motet import LLM, AsyncLLM, LoRARequest, RequestOutput, RequestOutputKind, SamplingParams
from motet.errors import (
    ConfigError,
    ContextLengthError,
    EngineDiedError,
    ModelNotFoundError,
    NotFoundError,
    RequestError,
    UnauthorizedError,
)
from motet.llm.client import RetryRule, ServerClient
from motet.testing.fake_adapters import make_adapter
from motet.text.formats import ParserNames
from motet.types import ChoiceStart, GenerateRequest
from tests.fake_server import FakeServer
from tests.patience import PATIENCE_S
from tests.tiny_tokenizer import build_tiny_tokenizer, fake_answer, save_tiny_tokenizer

KEY, ADMIN = "secret", "admin"
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
QUESTION = [{"role": "user", "content": "what is the weather?"}]


FOREVER = fake_answer("x" * 150_000)
TOKENIZER = build_tiny_tokenizer()


def script(request: GenerateRequest, start: ChoiceStart) -> list[int]:
    """Repeats the prompt; generates without an end for a prompt with `forever`."""
    return answer_to(request.prompt, start.index)


@cache
def answer_to(prompt: tuple[int, ...], index: int) -> list[int]:
    text = TOKENIZER.decode(list(prompt), skip_special_tokens=False)
    if "weather" in text:
        return fake_answer(f"I look. {CALL}")
    return FOREVER if "forever" in text else fake_answer(f"{index}: {text}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[FakeServer]:
    with FakeServer(
        folder,
        script,
        api_key=KEY,
        admin_key=ADMIN,
        max_model_len=200_000,
        max_adapters=8,
        parsers=ParserNames(tools="hermes"),
    ) as running:
        running.engine.scenario.gate = asyncio.Semaphore(10**9)  # lets other tasks run between two steps
        yield running


@pytest.fixture(scope="module")
def llm(server: FakeServer) -> Iterator[LLM]:
    with LLM(url=server.url, api_key=KEY) as running:
        yield running


def texts(outputs: list[RequestOutput]) -> list[list[str]]:
    return [[choice.text for choice in output.outputs] for output in outputs]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  the engine is in another thread
            await asyncio.sleep(0.002)


def test_outputs_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt {number % 7} {number}" for number in range(20)]
    each = [SamplingParams(n=1 + number % 3, max_tokens=40) for number in range(20)]
    outputs = llm.generate(prompts, each)
    assert texts(outputs) == [
        [f"{index}: {prompt}" for index in range(params.n)] for prompt, params in zip(prompts, each, strict=True)
    ]
    assert all(output.finished and output.prompt == prompt for output, prompt in zip(outputs, prompts, strict=True))
    assert llm.generate([]) == [] and llm.chat([]) == []


def test_a_prompt_of_many_that_is_refused_ends_the_others(server: FakeServer, llm: LLM) -> None:
    prompts: list[str | list[int]] = ["fine", "forever", [10**6], "forever"]
    with pytest.raises(RequestError, match="token id 1000000") as raised:
        llm.generate(prompts, SamplingParams(max_tokens=None))
    assert raised.value.param == "prompt_token_ids"
    assert raised.value.__notes__ == ["This was prompt 2 of 4, counted from 0."]
    asyncio.run(until(lambda: not server.engine.open))


def test_an_interrupt_returns_what_is_finished(server: FakeServer, llm: LLM) -> None:
    def interrupt() -> None:
        asyncio.run(until(lambda: len(server.engine.open) == 2 and len(server.engine.requests) >= known + 4))
        llm.generate("c", SamplingParams())  # the answers to a and b arrive before this one
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    known = len(server.engine.requests)
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    outputs = llm.generate(["a", "forever 1", "b", "forever 2"], SamplingParams(max_tokens=None))
    interrupting.join()
    assert [output.finished for output in outputs] == [True, False, True, False]
    assert texts(outputs) == [["0: a"], [], ["0: b"], []]
    assert [output.prompt for output in outputs] == ["a", "forever 1", "b", "forever 2"]
    asyncio.run(until(lambda: not server.engine.open))


def test_an_interrupt_without_results_is_raised(server: FakeServer, llm: LLM) -> None:
    def interrupt() -> None:
        asyncio.run(until(lambda: len(server.engine.open) == 1))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate("forever", SamplingParams(max_tokens=None))
    interrupting.join()
    asyncio.run(until(lambda: not server.engine.open))


@pytest.mark.anyio
async def test_leaving_a_stream_or_cancelling_frees_the_engine(server: FakeServer) -> None:
    async with AsyncLLM(url=server.url, api_key=KEY) as llm:
        params = SamplingParams(n=2, max_tokens=None)
        async for step in llm.stream("forever", params):
            assert step.outputs and not step.finished
            break
        await until(lambda: not server.engine.open)
        async with aclosing(llm.stream("forever", params)) as steps:
            await anext(steps)
        await until(lambda: not server.engine.open)
        task = asyncio.create_task(llm.generate(["forever", "forever too"], params))
        await until(lambda: len(server.engine.open) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not server.engine.open)
        assert texts(await llm.generate("after", SamplingParams(max_tokens=20))) == [["0: after"]]


@pytest.mark.anyio
async def test_the_kinds_of_steps(server: FakeServer) -> None:
    async with AsyncLLM(url=server.url, api_key=KEY) as llm:

        async def steps(kind: RequestOutputKind) -> list[RequestOutput]:
            params = SamplingParams(n=2, max_tokens=40, output_kind=kind)
            return [step async for step in llm.stream("steps", params)]

        (complete,) = await llm.generate("steps", SamplingParams(n=2, max_tokens=40))
        (final,) = await steps(RequestOutputKind.FINAL_ONLY)
        cumulative = await steps(RequestOutputKind.CUMULATIVE)
        deltas = await steps(RequestOutputKind.DELTA)
    assert final.outputs == complete.outputs == cumulative[-1].outputs
    assert final.finished and cumulative[-1].finished and deltas[-1].finished
    lengths = [len(step.outputs[0].token_ids) for step in cumulative]
    assert lengths == sorted(lengths)
    assert sum(len(choice.token_ids) for step in deltas for choice in step.outputs) == sum(
        len(choice.token_ids) for choice in complete.outputs
    )


def test_a_chat_has_its_tool_calls_and_its_complete_text(llm: LLM) -> None:
    (output,) = llm.chat(QUESTION, SamplingParams(n=2, max_tokens=None), tools=TOOLS)
    for choice in output.outputs:
        assert choice.text == f"I look. {CALL}"
        assert choice.content is not None and choice.content.strip() == "I look."
        assert [(call.function.name, call.function.arguments) for call in choice.tool_calls] == [
            ("weather", '{"city": "Paris"}')
        ]
        assert choice.finish_reason == "tool_calls"


@pytest.mark.anyio
async def test_a_conversation_can_be_streamed_and_scored_fields_are_checked(server: FakeServer) -> None:
    async with AsyncLLM(url=server.url, api_key=KEY) as llm:
        params = SamplingParams(max_tokens=None)
        text = "".join([step.outputs[0].text async for step in llm.stream(QUESTION, params, tools=TOOLS)])
        assert text == f"I look. {CALL}"
        with pytest.raises(RequestError, match="'tools' is for conversations"):
            _ = [step async for step in llm.stream("x", tools=TOOLS)]
        with pytest.raises(RequestError, match="temprature"):
            await llm.chat(QUESTION, temprature=1)  # type: ignore[call-arg]


def test_errors_of_the_server_have_their_classes(server: FakeServer, llm: LLM) -> None:
    with pytest.raises(ModelNotFoundError, match="nobody"):
        llm.generate("x", SamplingParams(), adapter="nobody")
    with pytest.raises(RequestError) as raised:
        llm.generate("x", SamplingParams(n=1000))
    assert (raised.value.param, raised.value.code) == ("n", "integer_above_max_value")
    with LLM(url=server.url, api_key="wrong") as other, pytest.raises(UnauthorizedError):
        other.generate("x", SamplingParams())
    with LLM("absent", url=server.url, api_key=KEY) as other, pytest.raises(NotFoundError):
        other.get_default_sampling_params()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"),
    [("hello", 10**6, "prompt"), ([5], 10**6, "prompt_token_ids"), ([10**6], 1, "prompt_token_ids")],
    ids=str,
)
def test_an_error_of_a_prompt_names_the_argument(llm: LLM, prompt: Any, max_tokens: int, param: str) -> None:
    with pytest.raises(RequestError) as raised:
        llm.generate([prompt], SamplingParams(max_tokens=max_tokens))
    assert raised.value.param == param and not re.search(r"\btoken_ids\b", raised.value.message)


@pytest.mark.anyio
async def test_an_error_of_a_stream_names_the_argument(server: FakeServer) -> None:
    async with AsyncLLM(url=server.url, api_key=KEY) as llm:
        for prompt, param in (("hello", "prompt"), (QUESTION, "messages")):
            with pytest.raises(ContextLengthError) as raised:
                _ = [step async for step in llm.stream(prompt, SamplingParams(max_tokens=10**6))]
            assert raised.value.param == param


def test_an_adapter_is_loaded_when_it_is_first_used(server: FakeServer, llm: LLM, tmp_path: Path) -> None:
    poet = LoRARequest("poet", 1, str(make_adapter(tmp_path / "poet")))
    sql = LoRARequest("sql", 2, str(make_adapter(tmp_path / "sql", "sql")))
    params = SamplingParams(max_tokens=20)
    with pytest.raises(UnauthorizedError, match="admin key"):
        llm.generate("x", params, lora_request=poet)
    with LLM(url=server.url, api_key=KEY, admin_key=ADMIN) as admin:
        known = len(server.engine.requests)
        (first,) = admin.generate("x", params, lora_request=poet)
        mixed = admin.generate(["x", "x", "x"], params, lora_request=[poet, None, sql])
        assert sorted(request.model for request in server.engine.requests[known:]) == ["", "poet", "poet", "sql"]
        assert texts(mixed)[0] == texts([first])[0] != texts(mixed)[1] == ["0: x"]
        make_adapter(tmp_path / "sql", "changed")
        again = replace(sql, load_inplace=True)
        assert texts(admin.chat([QUESTION], params, lora_request=again))
    assert texts(llm.generate("x", params, lora_request=poet)) == texts([first])
    assert texts(llm.generate("x", params, adapter="poet")) == texts([first])
    versions = {adapter.name: adapter.version for adapter in server.engine.info.adapters}
    assert versions == {"poet": "1", "sql": "3"}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"lora_request": LoRARequest("other", 1, "/absent")}, "No adapter found for /absent"),
        ({"lora_request": LoRARequest("tiny", 1, "/absent")}, "name of a base model"),
        ({"lora_request": [LoRARequest("a", 1, "/a"), LoRARequest("a", 2, "/b")]}, "two adapters have the same"),
        ({"lora_request": [None]}, "has 1 values, and there are 2 prompts"),
        ({"lora_request": "poet"}, "expected LoRARequest"),
        ({"lora_request": LoRARequest("a", 1, "/a"), "adapter": "poet"}, "either adapter or lora_request"),
    ],
    ids=str,
)
def test_a_wrong_adapter_is_refused(server: FakeServer, call: dict[str, Any], says: str) -> None:
    with LLM(url=server.url, api_key=KEY, admin_key=ADMIN) as llm, pytest.raises(RequestError, match=says):
        llm.generate(["x", "y"], SamplingParams(), **call)


def test_an_adapter_with_the_name_of_another_is_refused(server: FakeServer, tmp_path: Path) -> None:
    with LLM(url=server.url, api_key=KEY, admin_key=ADMIN) as llm:
        llm.generate("x", SamplingParams(), lora_request=LoRARequest("same", 1, str(make_adapter(tmp_path / "a"))))
        with pytest.raises(RequestError, match=r"'same' from .*/a, not from .*/b: choose another name"):
            llm.generate("x", SamplingParams(), lora_request=LoRARequest("same", 2, str(tmp_path / "b")))


@pytest.mark.parametrize("fields", [("a", 0, "/a"), ("a", "1", "/a"), ("", 1, "/a"), ("a", 1, "")], ids=str)
def test_a_wrong_field_of_an_adapter_is_refused(fields: tuple[Any, Any, Any]) -> None:
    with pytest.raises(RequestError, match="Invalid 'lora_"):
        LoRARequest(*fields)


def test_wrong_arguments_are_refused_before_anything_is_sent(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"has 1 values, and there are 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(RequestError, match=r"prompts\[1\]"):
        llm.generate(["a", 1.5])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"multi_modal_data"):
        llm.generate({"prompt": "a", "multi_modal_data": {}})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"dtype: the server at .* runs already"):
        LLM(url=llm.url, dtype="float32")
    with pytest.raises(ConfigError, match="api_key"):
        LLM("smollm2", api_key="k")
    with pytest.raises(TypeError, match="another process"):
        copy.copy(llm)


def test_calls_of_several_threads_run_at_the_same_time(server: FakeServer, llm: LLM) -> None:
    outputs: list[list[RequestOutput]] = []
    threads = [
        threading.Thread(target=lambda n=n: outputs.append(llm.generate(f"t{n}", SamplingParams(max_tokens=20))))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts(output)[0][0] for output in outputs) == [f"0: t{n}" for n in range(4)]


def test_a_server_that_is_not_there_is_named() -> None:
    client = ServerClient("http://127.0.0.1:1", retry=RetryRule(absent_s=0))
    with pytest.raises(EngineDiedError, match=r"127\.0\.0\.1:1 cannot be reached"):
        asyncio.run(client.get("/v1/models", answer=dict))


def test_a_batch_survives_a_restart_of_its_server(folder: Path) -> None:
    """The bug: the answers to requests in progress, 503 `engine_closed`, ended the batch."""
    prompts, params = [f"prompt {number}" for number in range(6)], SamplingParams(n=2, max_tokens=20)
    outputs: list[RequestOutput] = []
    with FakeServer(folder, script) as first:
        first.engine.scenario.gate = asyncio.Semaphore(0)  # the first server completes no request
        llm = LLM(url=first.url)
        batch = threading.Thread(target=lambda: outputs.extend(llm.generate(prompts, params)))
        batch.start()
        asyncio.run(until(lambda: len(first.engine.open) == len(prompts)))
        first.stop_at_once()
    with FakeServer(folder, script, port=int(first.url.rpartition(":")[2])), llm:
        batch.join()
    assert texts(outputs) == [[f"{index}: {prompt}" for index in range(2)] for prompt in prompts]
