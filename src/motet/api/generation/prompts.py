"""The prompts of a request: texts and token ids in its body become token ids for the engine, long texts in a thread."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from motet.api.http.body import in_thread
from motet.api.http.failure import FieldError, invalid_type, invalid_value
from motet.text.prepare import PromptPreparer

T = TypeVar("T")

LONG_TEXT = 8192
"""Minimum number of characters of a text that is tokenised, or of a schema that is closed, in a thread. For shorter
texts the switch between threads costs more."""

Prompt = str | tuple[int, ...]
"""Text to be tokenised, or token ids."""


def parse_prompts(value: object) -> tuple[Prompt, ...]:
    """Reads a string, a list of strings, a list of token ids, or a list of such lists; all of the same kind."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        kinds = "a string, an array of strings, an array of token ids or an array of such arrays"
        raise FieldError(invalid_type, None, kinds)
    if not value:
        raise FieldError(invalid_value, None, "the array is empty; at least one prompt is needed")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(type(item) is int for item in value):
        return (tuple(value),)
    if all(isinstance(item, list) for item in value):
        return tuple(_token_ids(item, number) for number, item in enumerate(value))
    raise FieldError(invalid_type, None, "either strings, or token ids, or arrays of token ids in an array of prompts")


def _token_ids(item: list[object], number: int) -> tuple[int, ...]:
    ids = tuple(token for token in item if type(token) is int)
    if len(ids) != len(item):
        raise FieldError(invalid_type, number, "token ids, which are integers")
    return ids


async def text_prompt(preparer: PromptPreparer, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
    return await in_thread_if_long(partial(preparer.text_prompt, text, add_special_tokens, param=param), len(text))


async def completion_prompts(
    preparer: PromptPreparer, prompts: Sequence[Prompt], *, add_special_tokens: bool, param: str = "prompt"
) -> list[Sequence[int]]:
    """Returns the token ids of each prompt. `param`: the field with the prompts."""
    checked: list[Sequence[int]] = []
    for number, prompt in enumerate(prompts):
        place = param if len(prompts) == 1 else f"{param}[{number}]"
        ids: Sequence[int] = prompt if isinstance(prompt, tuple) else ()
        if isinstance(prompt, str):
            ids = await text_prompt(preparer, prompt, add_special_tokens=add_special_tokens, param=place)
        await in_thread_if_long(partial(preparer.check_prompt, ids, param=place), len(ids))
        checked.append(ids)
        await asyncio.sleep(0)  # other tasks run: there can be hundreds of prompts with thousands of tokens each
    return checked


async def in_thread_if_long(work: Callable[[], T], size: int) -> T:
    """Runs work on the event loop if it is short, otherwise in a thread. `size`: number of characters or tokens."""
    return work() if size < LONG_TEXT else await in_thread(work)
