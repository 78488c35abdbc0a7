"""The prompts of a request: texts and token ids in its body become token ids for the engine. This is done in the thread
for long work if the body is long."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from motet.api.generation.request_fields import TO_THE_LIMIT, TruncationFields
from motet.api.http.caller import Caller
from motet.api.http.failure import FieldError, invalid_type, invalid_value
from motet.api.http.long_work import LONG_WORK, in_thread_of
from motet.api.http.schema import as_integer
from motet.text.prepare import PromptPreparer
from motet.text.rendering.client_texts import RenderedPrompt
from motet.text.rendering.jinja import NeedsProcess

PROMPT_CHARS = 64
"""Number of characters whose tokenisation costs as much as the call for one prompt."""
Prompt = str | tuple[int, ...]
"""Text to be tokenised, or token ids."""


def parse_prompts(value: object) -> tuple[Prompt, ...]:
    """Reads a string, a list of token ids, or a list of prompts: strings and lists of token ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        kinds = "a string, an array of token ids or an array of such prompts"
        raise FieldError(invalid_type, None, kinds)
    if not value:
        raise FieldError(invalid_value, None, "the array is empty; at least one prompt is needed")
    if all(isinstance(item, str | list) for item in value):
        return tuple(item if isinstance(item, str) else token_ids(item, number) for number, item in enumerate(value))
    if any(isinstance(item, str | list) for item in value):
        raise FieldError(invalid_type, None, "either token ids, or prompts in an array of prompts")
    return (token_ids(value),)


def token_ids(item: list[object], number: int | None = None) -> tuple[int, ...]:
    """Reads a list of token ids. `number`: number of the list in an array of such lists, for errors."""
    ids = tuple(token for token in item if type(token) is int)
    if len(ids) != len(item):
        ids = tuple(token for token in map(as_integer, item) if type(token) is int)
    if len(ids) != len(item):
        raise FieldError(invalid_type, number, "token ids, which are integers")
    return ids


async def text_prompt(
    preparer: PromptPreparer, text: str, *, add_special_tokens: bool, param: str, caller: Caller
) -> list[int]:
    return await caller.in_thread_if_long(partial(preparer.text_prompt, text, add_special_tokens, param=param))


async def rendered_prompt(owner: object, render: Callable[[bool], RenderedPrompt], *, caller: Caller) -> RenderedPrompt:
    """Returns the text of a chat. `owner`: object in whose thread prompts wait for a process. `render`: takes True to
    wait for the process of the template, and False to raise `NeedsProcess` instead."""
    if caller.work_size < LONG_WORK:
        try:
            return render(False)
        except NeedsProcess:
            pass
    return await in_thread_of(owner, partial(render, True), client=caller.work_client)


def truncated(
    prompt: Sequence[int], fields: TruncationFields, *, max_model_len: int, num_reserved: int, param: str = ""
) -> Sequence[int]:
    """Returns the prompt, shortened as the request states. `num_reserved`: number of output tokens for which the
    shortened prompt leaves space. `param`: path of the fields in the body. Raises RequestError for a number that
    exceeds the model's length."""
    limit = fields.truncate_prompt_tokens
    if limit is None:
        return prompt
    if limit > max_model_len:
        why = f"it is {limit}, and the model's length is {max_model_len}"
        raise invalid_value(f"{param}truncate_prompt_tokens", why)
    if limit == TO_THE_LIMIT:
        limit = max_model_len - max(1, num_reserved)
    if not 0 < limit < len(prompt):
        return prompt
    return prompt[-limit:] if fields.truncation_side == "left" else prompt[:limit]


async def completion_prompts(
    preparer: PromptPreparer,
    prompts: Sequence[Prompt],
    *,
    add_special_tokens: bool,
    caller: Caller,
    param: str = "prompt",
) -> list[Sequence[int]]:
    """Returns the token ids of each prompt. `param`: the field with the prompts."""

    def checked(number: int) -> Sequence[int]:
        place, prompt = param if len(prompts) == 1 else f"{param}[{number}]", prompts[number]
        ids = preparer.text_prompt(prompt, add_special_tokens, param=place) if isinstance(prompt, str) else prompt
        preparer.check_prompt(ids, param=place)
        return ids

    all_ids: list[Sequence[int]] = []
    for piece in work_pieces([len(prompt) for prompt in prompts]):
        all_ids += await caller.in_thread_if_long(partial(list, map(checked, piece)))
        await asyncio.sleep(0)  # other tasks run, also if the body is short
    return all_ids


def work_pieces(sizes: Sequence[int]) -> Iterator[range]:
    """Yields the numbers of the prompts of each piece of work: one long prompt, or several prompts that are together
    shorter than `LONG_WORK`. `sizes`: number of characters or tokens of each prompt."""
    first = size = 0
    for number, own_size in enumerate(sizes):
        prompt_size = PROMPT_CHARS + own_size
        if number > first and size + prompt_size > LONG_WORK:
            yield range(first, number)
            first, size = number, 0
        size += prompt_size
    yield range(first, len(sizes))
