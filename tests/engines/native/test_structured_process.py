"""Grammars in a real engine process: compiled while steps continue, refused, and resumed after a death."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from motet.engines.native.client import NativeEngine
from motet.errors import EngineDiedError, GrammarError
from motet.ids import RequestId
from motet.types import ChoiceStart, GenerateRequest, Grammar, GrammarKind
from tests.engines.native.drive import group, make_core, prompt_of, run
from tests.engines.native.grammars import NUMBER, PERSON
from tests.engines.native.test_process import engine, idle, tokens_of
from tests.forked import ForkingProcess

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SLOW = Grammar(GrammarKind.JSON, json.dumps({"anyOf": [{"const": f"{i:06d}" * 9} for i in range(3000)]}))
"""A grammar that takes a while to compile."""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def native(model: Path, forking: ForkingProcess) -> AsyncIterator[NativeEngine]:
    async with engine(model, forking.spawn) as started:
        yield started


def person(name: str, **changes: object) -> GenerateRequest:
    return group(name, prompt_of(30), grammar=PERSON, max_tokens=120, **changes)  # type: ignore[arg-type]


async def test_groups_with_and_without_grammars_equal_those_of_the_core(native: NativeEngine, model: Path) -> None:
    requests = [
        person("a", n=3, seed=1),
        group("b", prompt_of(25, 1), n=2, seed=2),
        group("c", prompt_of(25, 2), n=2, seed=3, grammar=NUMBER),
        person("d", n=2, seed=9),
    ]
    expected = run(make_core(model), requests)
    found = await asyncio.gather(*(tokens_of(native, request) for request in requests))
    assert [expected[request.request_id].tokens for request in requests] == list(found)
    assert await idle(native)


async def test_an_invalid_grammar_is_refused_and_other_groups_continue(native: NativeEngine) -> None:
    free = native.generate(group("free", prompt_of(20), max_tokens=60))
    with pytest.raises(GrammarError) as refused:
        await tokens_of(native, group("bad", prompt_of(20), grammar=Grammar(GrammarKind.REGEX, "(((")))
    assert refused.value.code == "invalid_grammar"
    assert sum([len(delta.choices) async for delta in free]) == 60
    assert await idle(native)


async def test_a_group_that_ends_while_its_grammar_is_compiled_leaves_nothing(native: NativeEngine) -> None:
    for i in range(6):
        slow = Grammar(SLOW.kind, SLOW.source.replace("000001", f"99999{i}"))
        stream = native.generate(group(f"left {i}", prompt_of(20), n=2, grammar=slow))
        if i % 2:
            await native.stop_choice(RequestId(f"left {i}"), 0)
            await native.stop_choice(RequestId(f"left {i}"), 1)
        await stream.aclose()
    assert await idle(native)
    assert (await tokens_of(native, person("next")))[0]


async def test_choices_of_a_killed_engine_continue_in_another_one_as_if_undisturbed(
    native: NativeEngine, model: Path, forking: ForkingProcess
) -> None:
    """The output tokens before and after the death are the tokens of an undisturbed engine."""
    request = person("g", n=4, seed=21)
    expected = run(make_core(model), [request])["g"].tokens
    received: dict[int, list[int]] = {i: [] for i in range(4)}
    async with engine(model, forking.spawn) as dying:
        assert dying.info.pid is not None
        stream = dying.generate(request)
        while len(received[0]) < 12:
            for choice in (await anext(stream)).choices:
                received[choice.index] += choice.token_ids
        os.kill(dying.info.pid, signal.SIGKILL)
        await dying.died.wait()  # later deltas are not read, as if the engine had died before it sent them
        with pytest.raises(EngineDiedError):
            await anext(dying.generate(person("late")))
    left = [ChoiceStart(i, 21 + i, tuple(tokens)) for i, tokens in received.items() if tokens != expected[i]]
    assert left and all(start.output_tokens for start in left)
    rest = await tokens_of(native, person("rest", starts=left))
    assert {i: tokens + rest.get(i, []) for i, tokens in received.items()} == expected
    assert await idle(native)
