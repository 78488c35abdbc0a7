"""What a client wrote, as checked token ids. Long texts are tokenised in a thread, so that streams go on meanwhile."""

from collections.abc import Callable, Sequence

import msgspec
from anyio import to_thread

from motet.api.schema_chat import ChatPrompt
from motet.api.schema_completion import Prompt
from motet.errors import RequestError
from motet.text.prepare import Preparer

LONG_TEXT = 8192
"""Characters whose tokenising takes about as long as going to a thread and back is worth."""


async def chat_prompt(preparer: Preparer, chat: ChatPrompt) -> list[int]:
    messages = [message.for_template() for message in chat.messages]
    tools = chat.told_tools
    num_chars = sum(len(message.text) for message in chat.messages) + len(msgspec.json.encode(tools))
    template_kwargs = _effort(preparer, chat.reasoning_effort) | chat.chat_template_kwargs

    def render() -> list[int]:
        return preparer.chat_prompt(
            messages,
            add_generation_prompt=chat.ends_with_generation_prompt,
            continue_final_message=chat.continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )

    ids = await _beside_the_loop(render, num_chars)
    preparer.check_prompt(ids, param="messages")
    return ids


def _effort(preparer: Preparer, effort: str | None) -> dict[str, object]:
    """`reasoning_effort` as the variables that the chat template has for it."""
    if effort is None:
        return {}
    known: dict[str, object] = {"reasoning_effort": effort} if preparer.template_knows("reasoning_effort") else {}
    if effort == "none":
        return known | ({"enable_thinking": False} if preparer.template_knows("enable_thinking") else {})
    if not known:
        raise RequestError(
            f"Unsupported value: 'reasoning_effort' is '{effort}', and this model's chat template has no word for it.",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    return known


async def text_prompt(preparer: Preparer, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
    def encode() -> list[int]:
        return preparer.text_prompt(text, add_special_tokens, param=param)

    return await _beside_the_loop(encode, len(text))


async def completion_prompts(
    preparer: Preparer, prompts: Sequence[Prompt], *, add_special_tokens: bool
) -> list[Sequence[int]]:
    checked: list[Sequence[int]] = []
    for number, prompt in enumerate(prompts):
        param = "prompt" if len(prompts) == 1 else f"prompt[{number}]"
        ids: Sequence[int] = prompt if isinstance(prompt, tuple) else ()
        if isinstance(prompt, str):
            ids = await text_prompt(preparer, prompt, add_special_tokens=add_special_tokens, param=param)
        preparer.check_prompt(ids, param=param)
        checked.append(ids)
    return checked


async def _beside_the_loop(work: Callable[[], list[int]], num_chars: int) -> list[int]:
    return work() if num_chars < LONG_TEXT else await to_thread.run_sync(work)
