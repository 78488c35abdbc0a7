"""Every option of a request survives the loss of a worker: text, log-probabilities, stops, counts.

One decode engine has all the groups, and the other one continues them.
"""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.fault.answers import Body, fetch_answer
from tests.fault.fault_requests import (
    CHAT,
    COMPLETIONS,
    COUNTED,
    ENDS_AT_RANDOM,
    GENERATE,
    STREAMED,
    TEXT,
    chat,
    completion,
)
from tests.fault.faults import AllGenerated, generated, kill, paused, submitted
from tests.fault.oracle import Undisturbed
from tests.fault.running_cell import RunningCell
from tests.forked import ForkingProcess
from tests.tiny_tokenizer import FIRST_BYTE_ID

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

PENALTIES: Body = {"presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
NARROW: Body = {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8, "logit_bias": {"100": 5, "101": 4}}
TOKENS = 90
EVERY_OPTION: list[tuple[str, Body]] = [
    (CHAT, chat("penalties", PENALTIES, COUNTED, n=4, max_tokens=TOKENS, logprobs=True, top_logprobs=3)),
    (CHAT, chat("narrow", NARROW, STREAMED, n=4, max_tokens=TOKENS, return_token_ids=True)),
    (CHAT, chat("greedy", n=3, max_tokens=TOKENS, temperature=0)),
    (COMPLETIONS, completion("echo", COUNTED, n=3, max_tokens=TOKENS, prompts=2, echo=True, logprobs=2)),
    (COMPLETIONS, completion("echo unstreamed", n=2, max_tokens=TOKENS, echo=True, logprobs=4, return_token_ids=True)),
    (COMPLETIONS, completion("best", PENALTIES, n=2, best_of=6, max_tokens=TOKENS)),
    (COMPLETIONS, completion("ends", ENDS_AT_RANDOM, STREAMED, n=4, max_tokens=TOKENS, min_tokens=40, logprobs=0)),
    (COMPLETIONS, completion("strings", NARROW, n=4, max_tokens=TOKENS, stop=["e", "t", "a"], min_tokens=60)),
    (GENERATE, {
        "token_ids": [*range(40, 100)],
        "sampling_params": {"n": 3, "seed": 5, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 2},
    }),
]  # fmt: skip


@pytest.fixture(scope="module")
async def shared(folder: Path, forking: ForkingProcess, undisturbed: Undisturbed) -> AsyncIterator[RunningCell]:
    await undisturbed.start("float32")
    async with RunningCell(folder, spawn=forking.spawn) as cell:
        yield cell


async def test_every_option_holds_when_the_worker_of_all_is_killed(cell: RunningCell, undisturbed: Undisturbed) -> None:
    expected = [await undisturbed.answer(route, body) for route, body in EVERY_OPTION]
    moved = cell.moved
    groups = len(EVERY_OPTION) + 1  # one request has two prompts
    with cell.all_on("decode-0"):
        fault = cell.faults.arm(AllGenerated(groups, 12), kill)
        with paused(cell.engine("decode-0")):
            answering = [asyncio.create_task(fetch_answer(cell.http, route, body)) for route, body in EVERY_OPTION]
            await cell.until_submitted(groups)
        await fault.happened.wait()
    for (route, body), answer, expected_answer in zip(EVERY_OPTION, answering, expected, strict=True):
        assert await answer == expected_answer, (route, body)
    assert cell.moved - moved == groups


async def test_answers_wait_for_an_engine_when_all_that_decode_are_killed(
    cell: RunningCell, undisturbed: Undisturbed
) -> None:
    bodies = [(CHAT, chat("all", COUNTED, n=8)), (COMPLETIONS, completion("all", n=8, prompts=2, logprobs=1))]
    expected = [await undisturbed.answer(route, body) for route, body in bodies]
    cell.faults.arm(AllGenerated(3, 20), cell.on_all(kill))  # requests that arrive while no engine decodes are refused
    answers = await asyncio.gather(*(fetch_answer(cell.http, route, body) for route, body in bodies))
    assert answers == expected


async def test_a_group_can_have_another_fault_while_it_is_being_resumed(
    cell: RunningCell, undisturbed: Undisturbed
) -> None:
    body = completion("again", COUNTED, n=8, return_token_ids=True)
    expected = await undisturbed.answer(COMPLETIONS, body)
    cell.faults.arm(generated(20), cell.leave)
    again = cell.faults.arm(submitted, kill)
    assert await fetch_answer(cell.http, COMPLETIONS, body) == expected
    assert again.happened.is_set()


async def test_a_group_with_accepted_drafts_continues_when_its_worker_is_killed(
    cell: RunningCell, undisturbed: Undisturbed
) -> None:
    """Only three tokens are allowed, so the answer repeats itself and drafts are accepted."""
    few: Body = {"allowed_token_ids": [FIRST_BYTE_ID + ord(letter) for letter in "abc"], "temperature": 0.3}
    body = completion("drafts", few, COUNTED, n=2, max_tokens=TOKENS, logprobs=1, return_token_ids=True)
    expected = await undisturbed.answer(COMPLETIONS, body)
    before = (await cell.stats("decode-1")).accepted_tokens
    answer = await cell.fetch_answer_on(
        "decode-0",
        COMPLETIONS,
        body,
        point=lambda progress: progress.max_at_once > 1 and generated(30)(progress),
        action=kill,
    )
    assert answer == expected
    assert (await cell.stats("decode-1")).accepted_tokens - before > 5


async def test_the_official_client_continues_when_its_worker_is_killed(
    cell: RunningCell, undisturbed: Undisturbed
) -> None:
    expected = await undisturbed.answer(CHAT, chat("official", n=8, max_tokens=TOKENS))
    fault = cell.faults.arm(generated(30), kill)
    async with AsyncOpenAI(base_url=f"{cell.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"official: {TEXT * 4}"}],
            n=8,
            max_tokens=TOKENS,
            seed=7,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        texts, ends, usages = [""] * 8, [0] * 8, 0
        async for chunk in stream:
            usages += chunk.usage is not None
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ends[choice.index] += choice.finish_reason is not None
    assert fault.happened.is_set()
    assert texts == expected.texts
    assert (ends, usages) == ([1] * 8, 1)


def capital_pair(tokens: list[int]) -> tuple[int, str]:
    """Returns the position of the first two consecutive capital letters, and the letters. The tokenizer merges no
    capital letters."""
    capitals = range(FIRST_BYTE_ID + ord("A"), FIRST_BYTE_ID + ord("Z") + 1)
    for position, (one, other) in enumerate(pairwise(tokens)):
        if one in capitals and other in capitals:
            return position, chr(one - FIRST_BYTE_ID) + chr(other - FIRST_BYTE_ID)
    raise AssertionError("there are no consecutive capital letters")


CAPITALS: Body = {"logit_bias": {str(FIRST_BYTE_ID + ord(letter)): 3 for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}}


@pytest.mark.parametrize("index", [0, 3])
async def test_a_stop_string_starts_on_one_worker_and_ends_on_another(
    index: int, cell: RunningCell, undisturbed: Undisturbed
) -> None:
    free = completion("stop", CAPITALS, n=4, max_tokens=TOKENS, return_token_ids=True)
    place, stop = capital_pair((await undisturbed.answer(COMPLETIONS, free)).choices[index].token_ids)
    body = {**free, "stop": [stop], **COUNTED}
    expected = await undisturbed.answer(COMPLETIONS, body)
    stopped = expected.choices[index]
    assert (stopped.stop_reason, len(stopped.token_ids)) == (stop, place + 2)
    fault = cell.faults.arm(lambda progress: progress.generated.get(index) == place + 1, cell.leave)
    assert await fetch_answer(cell.http, COMPLETIONS, body) == expected
    assert fault.happened.is_set()


@pytest.mark.parametrize("seam", range(20, 26))
async def test_a_character_starts_on_one_worker_and_ends_on_another(
    seam: int, cell: RunningCell, undisturbed: Undisturbed
) -> None:
    """Half of the tokens are the first byte of an e with an accent, the other half are the second byte."""
    accent = {str(FIRST_BYTE_ID + byte): 100 for byte in "\u00e9".encode()}
    body = chat("accents", STREAMED, n=4, max_tokens=40, logit_bias=accent)
    expected = await undisturbed.answer(CHAT, body)
    assert all("\u00e9" in text for text in expected.texts)
    cell.faults.arm(generated(seam), cell.leave)
    assert await fetch_answer(cell.http, CHAT, body) == expected
