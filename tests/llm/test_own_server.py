"""`LLM` and `AsyncLLM` with servers of their own: equal to the HTTP API, and able to lose an engine."""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from motet import LLM, AsyncLLM, LoRARequest, RequestOutput, SamplingParams, StructuredOutputsParams
from motet.errors import ConfigError, EngineClosedError, EngineDiedError, ModelLoadError, StartupError
from tests.e2e.processes import wait_until_gone
from tests.engines.native.adapter_files import save_adapter
from tests.llm.conftest import SMALL
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow

PROMPTS = ["the hand in the sand", "hello and then another", "the hand in the end"]
MESSAGES = [{"role": "user", "content": "hello there"}]


def http(llm: LLM) -> httpx.Client:
    return httpx.Client(base_url=llm.url, headers={"authorization": f"Bearer {llm.api_key}"}, timeout=PATIENCE_S)


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def test_outputs_equal_completions_over_http(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, temperature=0.9, max_tokens=20, logprobs=2, prompt_logprobs=1)
    outputs = llm.generate(PROMPTS, params)
    assert [output.prompt for output in outputs] == PROMPTS
    body = {"prompt": PROMPTS, "n": 3, "seed": 5, "temperature": 0.9, "max_tokens": 20, "logprobs": 2}
    with http(llm) as client:
        answer = client.post("/v1/completions", json=body | {"return_token_ids": True, "prompt_logprobs": 1}).json()
    for number, sent in enumerate(answer["choices"]):
        output, choice = outputs[number // 3], outputs[number // 3].outputs[number % 3]
        assert (choice.index, choice.text) == (number % 3, sent["text"])
        assert (choice.token_ids, choice.finish_reason) == (sent["token_ids"], sent["finish_reason"])
        assert output.prompt_token_ids == sent["prompt_token_ids"]
        assert choice.logprobs is not None and output.prompt_logprobs is not None
        own = [entry[token] for entry, token in zip(choice.logprobs, choice.token_ids, strict=True)]
        assert [entry.logprob for entry in own] == sent["logprobs"]["token_logprobs"]
        assert [entry.decoded_token for entry in own] == sent["logprobs"]["tokens"]
        assert choice.cumulative_logprob == pytest.approx(sum(sent["logprobs"]["token_logprobs"]))
        assert output.prompt_logprobs[0] is None
        for entry, other in zip(output.prompt_logprobs[1:], sent["prompt_logprobs"][1:], strict=True):
            assert entry is not None
            assert {str(token): one.rank for token, one in entry.items()} == {t: o["rank"] for t, o in other.items()}


def test_token_ids_texts_and_mappings_are_the_same_prompt(llm: LLM) -> None:
    params = SamplingParams(seed=1, max_tokens=8)
    (first,) = llm.generate(PROMPTS[0], params)
    assert first.prompt_token_ids is not None
    ids = first.prompt_token_ids
    forms: list[Any] = [ids, {"prompt_token_ids": ids}, {"prompt": PROMPTS[0], "cache_salt": "a"}]
    assert tokens_of(llm.generate(forms, params)) == tokens_of([first]) * 3
    assert tokens_of(llm.generate(ids, params)) == tokens_of([first])


def test_a_chat_equals_the_chat_over_http(llm: LLM) -> None:
    params = SamplingParams(n=2, seed=7, temperature=0.8, max_tokens=24)
    (output,) = llm.chat(MESSAGES, params)
    body = {"messages": MESSAGES, "n": 2, "seed": 7, "temperature": 0.8, "max_tokens": 24, "return_token_ids": True}
    with http(llm) as client:
        answer = client.post("/v1/chat/completions", json=body).json()
        rendered = client.post("/detokenize", json={"tokens": output.prompt_token_ids}).json()["prompt"]
    assert output.prompt == rendered and "<|im_start|>user" in rendered
    for choice, sent in zip(output.outputs, answer["choices"], strict=True):
        assert (choice.token_ids, choice.content) == (sent["token_ids"], sent["message"]["content"])
        assert choice.finish_reason == sent["finish_reason"]
    assert llm.chat([MESSAGES, MESSAGES], params)[1].outputs == output.outputs


def test_kept_prompts_have_more_choices_without_a_prefill(llm: LLM) -> None:
    prompt = "the hand in the sand and in the land " * 3
    (output,) = llm.generate(prompt, SamplingParams(n=2, seed=3, max_tokens=8, keep_s=60))
    assert output.kept is not None and output.prompt_token_ids is not None
    more = output.kept.more(2)
    (together,) = llm.generate(prompt, SamplingParams(n=4, seed=3, max_tokens=8))
    assert [choice.index for choice in more.outputs] == [2, 3]
    assert output.outputs + more.outputs == together.outputs
    assert more.num_cached_tokens is not None and more.num_cached_tokens >= len(output.prompt_token_ids) - 1


def test_an_adapter_is_loaded_for_a_request_and_then_known_by_its_name(llm: LLM, folder: Path, tmp_path: Path) -> None:
    poet = LoRARequest("poet", 1, str(save_adapter(folder, tmp_path / "poet")))
    params = SamplingParams(n=2, seed=4, max_tokens=12)
    adapted = tokens_of(llm.generate(PROMPTS, params, lora_request=poet))
    assert adapted == tokens_of(llm.generate(PROMPTS, params, adapter="poet"))
    mixed = tokens_of(llm.generate(PROMPTS, params, lora_request=[poet, None, poet]))
    base = tokens_of(llm.generate(PROMPTS, params))
    assert mixed == [adapted[0], base[1], adapted[2]] and adapted[1] != base[1]


def test_a_seed_of_the_llm_makes_its_outputs_reproducible(llm: LLM) -> None:
    params = SamplingParams(n=2, max_tokens=8)

    def sampled(seed: int) -> list[list[list[int]]]:
        with LLM(url=llm.url, api_key=llm.api_key, seed=seed) as other:
            return tokens_of(other.generate([PROMPTS[0]] * 3, params))

    first = sampled(1)
    assert sampled(1) == first != sampled(2)
    assert len({tuple(tokens) for output in first for tokens in output}) == 6


def test_the_admin_key_opens_the_routes_of_trainers(llm: LLM) -> None:
    """The bug: a trainer could not push weights to the server of an `LLM`, whose random key it did not know."""
    with http(llm) as client:
        assert client.get("/server_info").status_code == 401
        headers = {"authorization": f"Bearer {llm.admin_key}"}
        assert client.get("/server_info", headers=headers).status_code != 401


def test_scores_and_structured_outputs(llm: LLM) -> None:
    score = llm.score("the hand in", [" the sand", [5, 6, 7]])
    assert [len(one.token_ids) for one in score.scores] == [len(one.token_logprobs) for one in score.scores]
    assert score.scores[1].token_ids == [5, 6, 7]
    assert score.scores[0].logprob == pytest.approx(sum(score.scores[0].token_logprobs))
    params = SamplingParams(n=4, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    (output,) = llm.chat(MESSAGES, params)
    assert {choice.text for choice in output.outputs} <= {"yes", "no"}


@pytest.mark.anyio
async def test_it_works_in_a_running_loop_and_streams_are_the_same_tokens(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=9, max_tokens=12, logprobs=1)
    (expected,) = llm.generate(PROMPTS[1], params)
    async with AsyncLLM(url=llm.url, api_key=llm.api_key) as core:
        assert (await core.generate(PROMPTS[1], params))[0].outputs == expected.outputs
        tokens: dict[int, list[int]] = {}
        texts: dict[int, str] = {}
        steps = [step async for step in core.stream(PROMPTS[1], params)]
    for step in steps:
        for choice in step.outputs:
            tokens[choice.index] = tokens.get(choice.index, []) + choice.token_ids
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert [tokens[index] for index in range(3)] == [choice.token_ids for choice in expected.outputs]
    assert [texts[index] for index in range(3)] == [choice.text for choice in expected.outputs]
    assert [step.finished for step in steps] == [False] * (len(steps) - 1) + [True]
    assert steps[-1].num_cached_tokens is not None


def in_child(llm: LLM, sender: Any) -> None:
    with contextlib.closing(sender):
        sender.send(tokens_of(llm.generate(PROMPTS[0], SamplingParams(seed=1, max_tokens=8))))


def test_a_forked_process_uses_the_same_server(llm: LLM) -> None:
    expected = tokens_of(llm.generate(PROMPTS[0], SamplingParams(seed=1, max_tokens=8)))
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe()
    child = context.Process(target=in_child, args=(llm, sender))
    child.start()
    assert receiver.poll(PATIENCE_S)
    assert receiver.recv() == expected
    child.join()
    assert child.exitcode == 0
    assert tokens_of(llm.generate(PROMPTS[0], SamplingParams(seed=1, max_tokens=8))) == expected


@pytest.fixture(scope="module")
def cell(folder: Path, module_forked: None) -> Iterator[LLM]:
    """One prefill and two decode engines, next to the server of `llm`."""
    with LLM(str(folder), **SMALL, prefill=1, decode=2) as running:
        yield running


def test_a_cell_equals_one_engine_even_if_an_engine_is_killed(llm: LLM, cell: LLM) -> None:
    prompts = [f"{PROMPTS[number % 3]} {number}" for number in range(40)]
    params = SamplingParams(n=4, seed=2, max_tokens=120, ignore_eos=True)
    expected = tokens_of(llm.generate(prompts, params))
    killed = threading.Event()

    def kill_a_busy_engine() -> None:
        with http(cell) as client:
            while not killed.is_set():
                for worker in client.get("/status").json()["workers"]:
                    if worker["role"] == "decode" and worker.get("groups_running"):
                        os.kill(worker["pid"], signal.SIGKILL)
                        killed.set()
                        return

    killer = threading.Thread(target=kill_a_busy_engine)
    killer.start()
    try:
        assert tokens_of(cell.generate(prompts, params)) == expected
        assert killed.is_set()
    finally:
        killed.set()
        killer.join()


def test_the_server_ends_with_its_llm(folder: Path, module_forked: None) -> None:
    with LLM(str(folder), **SMALL) as closed:
        own = closed._core.own_server  # noqa: SLF001
        assert own is not None
    wait_until_gone(own.pid, PATIENCE_S)
    with pytest.raises(EngineClosedError):
        closed.generate("x")
    dropped = LLM(str(folder), **SMALL)
    own = dropped._core.own_server  # noqa: SLF001
    assert own is not None
    del dropped
    gc.collect()
    wait_until_gone(own.pid, PATIENCE_S)


def test_the_error_says_how_the_server_ended(folder: Path, module_forked: None) -> None:
    with LLM(str(folder), **SMALL) as llm:
        own = llm._core.own_server  # noqa: SLF001
        assert own is not None
        os.kill(own.pid, signal.SIGKILL)
        with pytest.raises(EngineDiedError, match="the server of this LLM was ended by SIGKILL"):
            llm.generate("x")


def test_a_server_that_cannot_start_raises_the_reason(tmp_path: Path, module_forked: None) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StartupError) as raised:
        LLM(str(tmp_path))
    assert isinstance(raised.value, ModelLoadError | ConfigError), raised.value


def test_a_server_that_starts_too_late_names_the_argument(folder: Path, module_forked: None) -> None:
    with pytest.raises(StartupError, match=r"was not ready after 0.01 s \(start_timeout_s\)"):
        LLM(str(folder), start_timeout_s=0.01)


@pytest.mark.anyio
async def test_a_cancelled_start_leaves_no_process(folder: Path, module_forked: None) -> None:
    llm = AsyncLLM(str(folder), **SMALL)
    starting = asyncio.create_task(llm.start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert llm.own_server is not None
    with contextlib.suppress(AttributeError):  # it was cancelled before there was a process
        wait_until_gone(llm.own_server.pid, PATIENCE_S)
