"""Prompts as programs give them, and the order in which they are sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NotRequired, TypedDict

from motet.errors import RequestError
from motet.llm.sampling_params import SamplingParams


class TextPrompt(TypedDict):
    """A prompt as text, under vLLM's name."""

    prompt: str
    cache_salt: NotRequired[str]
    """Prompts share cached blocks only with prompts of the same salt."""


class TokensPrompt(TypedDict):
    """A prompt as token ids, under vLLM's name."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    """The text of the tokens, which is only returned."""
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
Message = Mapping[str, object]
"""A message of a chat in OpenAI's form: `role`, `content`, ..."""
Conversation = Sequence[Message]


class ChatFields(TypedDict, total=False):
    """Fields of a chat in addition to its messages, as in docs/api.md."""

    tools: Sequence[Mapping[str, object]] | None
    """Functions in OpenAI's form."""
    tool_choice: str | Mapping[str, object] | None
    parallel_tool_calls: bool | None
    reasoning_effort: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    """A Jinja template in place of the model's own. A server that was not started by an LLM can refuse it."""
    chat_template_kwargs: Mapping[str, object] | None
    """Variables of the template."""
    chat_template_content_format: Literal["auto", "string"]
    """Has no effect: contents are texts."""


KEYS: Final = TextPrompt.__annotations__.keys() | TokensPrompt.__annotations__.keys()


@dataclass(frozen=True, kw_only=True)
class CheckedPrompt:
    """A prompt: a text, or token ids, or a conversation."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Conversation | None = None
    cache_salt: str = ""

    @property
    def order(self) -> tuple[int, str | tuple[int, ...]]:
        """Key for sorting prompts, so that prompts with the same beginning follow each other."""
        if self.token_ids is not None:
            return 0, tuple(self.token_ids)
        return (1, self.text) if self.text is not None else (2, str(self.messages))


def checked_prompts(prompts: "Prompt | Sequence[Prompt]") -> list[CheckedPrompt]:
    """Returns one or several prompts. Raises RequestError for a prompt that is neither a text nor token ids.

    >>> [prompt.text or prompt.token_ids for prompt in checked_prompts(["Hi", [1, 2], {"prompt": "Ho"}])]
    ['Hi', [1, 2], 'Ho']
    >>> [prompt.token_ids for prompt in checked_prompts([1, 2])]
    [[1, 2]]
    """
    if isinstance(prompts, str | Mapping) or _is_token_ids(prompts):
        return [_checked(prompts, "prompts")]
    if not isinstance(prompts, Sequence):
        raise _wrong("prompts", prompts)
    return [_checked(prompt, f"prompts[{number}]") for number, prompt in enumerate(prompts)]


def checked_conversations(messages: Conversation | Sequence[Conversation]) -> list[CheckedPrompt]:
    """Returns one or several conversations. Raises RequestError for one that is not a list of messages."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError("Invalid type for 'messages': expected a list of messages.", param="messages")
    several = bool(messages) and not isinstance(messages[0], Mapping)
    checked = []
    for number, conversation in enumerate(messages if several else [messages]):
        name = f"messages[{number}]" if several else "messages"
        is_list = isinstance(conversation, Sequence) and not isinstance(conversation, str)
        if not is_list or not all(isinstance(message, Mapping) for message in conversation):
            expected = "expected a list of messages, each with a role and a content"
            raise RequestError(f"Invalid type for '{name}': {expected}.", param=name, code="invalid_type")
        if conversation or several:
            checked.append(CheckedPrompt(messages=conversation))  # type: ignore[arg-type]
    return checked


def chat_body(fields: ChatFields) -> dict[str, object]:
    """Returns the fields as members of the body of a chat. Raises RequestError for an unknown field."""
    values: dict[str, object] = {**fields}
    for name in values:
        if name not in ChatFields.__annotations__:
            known = ", ".join(ChatFields.__annotations__)
            message = f"Unknown parameter: '{name}'. A chat has {known}."
            raise RequestError(message, param=name, code="unknown_parameter")
    if values.pop("chat_template_content_format", "auto") not in ("auto", "string"):
        message = "Invalid 'chat_template_content_format': it must be auto or string."
        raise RequestError(message, param="chat_template_content_format", code="invalid_value")
    return {name: value for name, value in values.items() if value is not None}


def params_for_each(values: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """Returns the parameters of each prompt. Raises RequestError for another type, and for another number of values."""
    name = "sampling_params"
    each = [*values] if isinstance(values, Sequence) else [values] * count
    if wrong := [value for value in each if not isinstance(value, SamplingParams)]:
        why = f"expected SamplingParams, or one for each prompt, got {type(wrong[0]).__name__} {repr(wrong[0])[:60]}"
        raise RequestError(f"Invalid type for '{name}': {why}.", param=name, code="invalid_type")
    if len(each) != count:
        why = f"it has {len(each)} values, and there are {count} prompts"
        raise RequestError(f"Invalid '{name}': {why}.", param=name, code="invalid_value")
    return each


def checked_continuations(values: object) -> list[object]:
    """Returns the continuations of a prompt, which the server checks. Raises RequestError for a value that is not a
    list of them, such as a single text.

    >>> checked_continuations([" Paris", (5, 6)])
    [' Paris', [5, 6]]
    """
    if isinstance(values, str | Mapping) or not isinstance(values, Sequence):
        why = f"expected a list of texts or of lists of token ids, got {type(values).__name__} {repr(values)[:60]}"
        raise RequestError(f"Invalid type for 'continuations': {why}.", param="continuations", code="invalid_type")
    return [[*value] if isinstance(value, list | tuple) else value for value in values]


def one_prompt(prompt: Prompt | Conversation) -> CheckedPrompt:
    """Returns one prompt or one conversation. Raises RequestError for several."""
    items: Sequence[object] = () if isinstance(prompt, str | Mapping) else prompt
    is_chat = bool(items) and isinstance(items[0], Mapping) and "role" in items[0]
    checked = checked_conversations(prompt) if is_chat else checked_prompts(prompt)  # type: ignore[arg-type]
    if len(checked) != 1:
        message = f"Invalid 'prompt': expected one prompt, got {len(checked)}."
        raise RequestError(message, param="prompt", code="invalid_value")
    return checked[0]


def send_order(prompts: Sequence[CheckedPrompt]) -> list[int]:
    """Returns the numbers of the prompts in the order in which they are sent: the server has cached the beginning that
    a prompt shares with the one before it."""
    return sorted(range(len(prompts)), key=lambda number: prompts[number].order)


def _is_token_ids(value: object) -> bool:
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], int)


def _checked(prompt: object, name: str) -> CheckedPrompt:
    if isinstance(prompt, str):
        return CheckedPrompt(text=prompt)
    if isinstance(prompt, Mapping):
        if unknown := [key for key in prompt if key not in KEYS]:
            message = f"Unsupported parameter: '{name}.{unknown[0]}': a prompt has {' or '.join(sorted(KEYS))}."
            raise RequestError(message, param=f"{name}.{unknown[0]}", code="unsupported_parameter")
        text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
        if isinstance(text, str | None) and isinstance(salt, str | None) and (ids is not None or text is not None):
            return CheckedPrompt(text=text, token_ids=_checked_ids(ids, name), cache_salt=salt or "")
        raise _wrong(name, prompt)
    return CheckedPrompt(token_ids=_checked_ids(prompt, name))


def _checked_ids(value: object, name: str) -> list[int] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise _wrong(name, value)
    if not all(type(token) is int and token >= 0 for token in value):
        ids = [int(token) for token in value if hasattr(token, "__index__") and int(token) >= 0]  # numpy's integers
        if len(ids) != len(value):
            raise _wrong(name, value)
        return ids
    return [*value]


def _wrong(name: str, value: object) -> RequestError:
    shown = repr(value)[:60]
    expected = "expected a text, a list of token ids, or a mapping with 'prompt' or 'prompt_token_ids'"
    return RequestError(f"Invalid type for '{name}': {expected}, got {shown}.", param=name, code="invalid_type")
