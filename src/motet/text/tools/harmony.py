"""gpt-oss, whose calls are messages of their own to a recipient; the tags are special tokens:

<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

The recipient may stand before the channel too. A region begins behind `to=functions.`, with the name.
"""

from collections.abc import Iterator, Mapping, Sequence

from motet.constraint import Thinking
from motet.text.tools.base import Reading, Tool, ToolFormat, ToolMode, ToolRules
from motet.text.tools.call_ids import call_id
from motet.text.tools.cursor import Cursor
from motet.text.tools.json_calls import arguments_of
from motet.text.tools.lark import document, named_arguments, quoted, tag
from motet.text.tools.reading import Found, named, reading_of

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TAGS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
TO_FUNCTIONS = "to=functions."

THOUGHT = Thinking(
    open=f"{CHANNEL}analysis{MESSAGE}",
    close=f"{END}{START}assistant",
    opened=False,
    before_answer=f"{CHANNEL}final{MESSAGE}",
)
"""Around an answer that a grammar binds."""


def read(text: str, final: bool, tools: Sequence[Tool]) -> Reading:
    return reading_of(_call(Cursor(text), tools), text, final=final)


def _call(cursor: Cursor, tools: Sequence[Tool]) -> Iterator[Found]:
    name = named(cursor, tools, " ", "<")
    cursor.until(MESSAGE)
    cursor.literal(MESSAGE)
    yield from arguments_of(cursor, name)


def grammar(rules: ToolRules, special: Mapping[str, int]) -> str:
    """An answer ends with its call, as the model's own do: a second one is the next turn's."""
    channel, message, constrain = (tag(text, special) for text in (CHANNEL, MESSAGE, CONSTRAIN))
    next_message = f'{tag(END, special)} {tag(START, special)} "assistant"'
    calls = named_arguments(
        rules.callable,
        lambda name, i: (
            f"{channel} {quoted(f'commentary {TO_FUNCTIONS}{name} ')} "
            f"{constrain} {quoted('json')} {message} arguments_{i}"
        ),
    )
    rest = "call" if rules.mode is ToolMode.REQUIRED else "(final | preamble? call)"
    lines = [
        f"start: thought* {rest}",
        f"thought: {channel} {quoted('analysis')} {message} TEXT {next_message}",
        f"preamble: {channel} {quoted('commentary')} {message} TEXT {next_message}",
        f"final: {channel} {quoted('final')} {message} TEXT",
        r"TEXT: /(.|\n)*/",
    ]
    return document(lines, calls)


HARMONY = ToolFormat(
    name="openai",
    begins=TAGS,
    ends=(),
    read=read,
    grammar=grammar,
    known_by=(CHANNEL, MESSAGE, "functions."),
    new_call_id=call_id,
)
