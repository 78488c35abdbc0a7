"""Answers of gpt-oss, rendered by OpenAI's own package, are parsed in one piece, cut at many points and token by
token."""

import json

import pytest
from msgspec.structs import replace
from openai_harmony import HarmonyEncodingName, Message, Role, load_harmony_encoding

from motet.text.answers import CallRules
from motet.text.harmony import HARMONY, harmony_format
from motet.text.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from motet.text.tools.tool_format import Tool
from tests.property_settings import some
from tests.text.small_format import joined

WEATHER = Tool(name="get_weather", parameters={"type": "object"}, strict=False)
ENCODING = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
PROMPT_END = "<|start|>assistant"

THOUGHT = Message.from_role_and_content(Role.ASSISTANT, "Look at ⛅ 10 < 20.").with_channel("analysis")
PREAMBLE = Message.from_role_and_content(Role.ASSISTANT, "I look it up.").with_channel("commentary")
ANSWER = Message.from_role_and_content(Role.ASSISTANT, "It is **sunny** in Zürich 😀.").with_channel("final")
CALL = (
    Message.from_role_and_content(Role.ASSISTANT, json.dumps({"city": "Zürich", "days": [1, 2]}))
    .with_channel("commentary")
    .with_recipient("functions.get_weather")
    .with_content_type("<|constrain|>json")
)


def generated(*messages: Message) -> str:
    """Returns the text that the model generates: the prompt ends after the first `<|start|>assistant`."""
    text = "".join(ENCODING.decode_utf8(ENCODING.render(message)) for message in messages)
    assert text.startswith(PROMPT_END)
    return text.removeprefix(PROMPT_END)


def read(text: str, *, size: int | None = None, cut: bool = False, parallel: bool = True) -> list[Part]:
    parser = harmony_format(CallRules(HARMONY, (WEATHER,), parallel)).parser()
    parts: list[Part] = []
    for start in range(0, len(text), size or len(text) or 1):
        parts += parser.feed(text[start : start + (size or len(text))], [0])
    return joined([unnamed(part) for part in parts + parser.close(cut=cut)])


def unnamed(part: Part) -> Part:
    """Returns a part without the id of its call, which is random."""
    return replace(part, id="") if isinstance(part, ToolCallBegin) else part


ARGUMENTS = '{"city": "Z\\u00fcrich", "days": [1, 2]}'
CALL_PARTS = [ToolCallBegin(0, "", "get_weather"), ToolCallArguments(0, ARGUMENTS)]
READ = {
    "reasoning and answer": (
        (THOUGHT, ANSWER),
        [Reasoning("Look at ⛅ 10 < 20."), Content("It is **sunny** in Zürich 😀.")],
    ),
    "reasoning and call": ((THOUGHT, CALL), [Reasoning("Look at ⛅ 10 < 20."), *CALL_PARTS]),
    "preamble and call": ((PREAMBLE, CALL), [Content("I look it up."), *CALL_PARTS]),
    "two messages of reasoning": ((THOUGHT, THOUGHT), [Reasoning("Look at ⛅ 10 < 20." * 2)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_messages_become_parts_wherever_the_text_is_cut(name: str) -> None:
    messages, parts = READ[name]
    text = generated(*messages)
    assert read(text) == parts
    assert all(read(text, size=size) == parts for size in (1, *some(range(2, len(text)), name)))


CALL_START = ToolCallBegin(0, "", "get_weather")
CALLING = "<|channel|>commentary to=functions.get_weather json<|message|>"
UNKNOWN = '<|channel|>commentary to=functions.fly <|constrain|>json<|message|>{"a": 1}'
OTHER = "<|channel|>commentary to=browser.search json<|message|>{}"
ODD: dict[str, tuple[str, bool, list[Part]]] = {
    "a recipient before the channel": (
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        False,
        [CALL_START, ToolCallArguments(0, '{"a": 1}')],
    ),
    "no header": ("Hello", False, [Content("Hello")]),
    "no channel": ("<|message|>Hello", False, [Content("Hello")]),
    "an unknown tool": (f"{UNKNOWN}<|call|>", False, [Content(UNKNOWN)]),
    "a recipient that is not a tool of a request": (f"{OTHER}<|call|>", False, [Content(OTHER)]),
    "invalid JSON": (
        CALLING + '{"a": ]}<|call|>',
        False,
        [CALL_START, ToolCallArguments(0, '{"a":'), Content(CALLING + '{"a": ]}')],
    ),
    "a call cut off": (CALLING + '{"city": "Par', True, [CALL_START, ToolCallArguments(0, '{"city": "Par')]),
    "a call that the model did not finish": (
        CALLING + '{"city": "Par',
        False,
        [CALL_START, ToolCallArguments(0, '{"city": "Par'), Content(CALLING + '{"city": "Par')],
    ),
    "a header cut off": (
        generated(THOUGHT) + "<|start|>assistant<|channel|>fin",
        True,
        [Reasoning("Look at ⛅ 10 < 20.")],
    ),
}
"""For each case: the text, True if it was cut off, and its parts."""


@pytest.mark.parametrize("name", ODD)
def test_unusual_answers_are_parsed_as_far_as_possible(name: str) -> None:
    text, cut, parts = ODD[name]
    assert read(text, cut=cut) == read(text, size=1, cut=cut) == parts


def test_without_parallel_calls_only_the_first_one_is_parsed() -> None:
    text = generated(CALL) + generated(CALL)
    assert [part for part in read(text, parallel=False) if isinstance(part, ToolCallBegin)] == [CALL_PARTS[0]]


def test_reasoning_tokens_are_counted_with_their_tags() -> None:
    plain = Message.from_role_and_content(Role.ASSISTANT, "Ten is less than twenty.").with_channel("analysis")
    thought = ENCODING.encode(generated(plain), allowed_special="all")
    answer = ENCODING.encode(f"{PROMPT_END}<|channel|>final<|message|>It is.", allowed_special="all")
    parser = harmony_format(None).parser()
    for token_id in (*thought, *answer):
        parser.feed(ENCODING.decode_utf8([token_id]), [token_id])
    assert parser.reasoning_tokens == len(thought)
