"""gpt-oss, which answers in OpenAI's harmony format: messages, each with a channel and at times a recipient.

    <|channel|>analysis<|message|>We need ...<|end|><|start|>assistant<|channel|>final<|message|>It is ...
               Reasoning                                               Content

    <|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
                                       ToolCallBegin                           ToolCallArguments

The tags are special tokens, and the recipient may stand before the channel too. Headers are read by OpenAI's own parser
(the package `oss-harmony`). Messages on the channel `commentary` are content (they are written for the user), unless
they go to a tool. Text without a header is content.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

from motet.text.answers import CallRegion, CallRules, ShownCalls
from motet.text.parts import AnswerFormat, Content, Part, Reasoning
from motet.text.stop_strings import StopMatcher, StopStrings
from motet.text.tools.cursor import Cursor
from motet.text.tools.grammar import call_rules, document, tag
from motet.text.tools.json_formats import json_arguments_of
from motet.text.tools.tool_format import ParsedCall, Tool, ToolFormat, ToolMode, ToolRules, region_reader, tool_until
from motet.text.tools.typed import quoted
from motet.types import Thinking

if TYPE_CHECKING:
    from openai_harmony import HarmonyEncoding, StreamableParser

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TAGS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
TO_FUNCTIONS = "to=functions."
ANALYSIS = "analysis"
BEGUN = f"{START}assistant"
"""The prompt ends with this, so the first message of an answer lacks it."""
THOUGHT = Thinking(
    open=f"{CHANNEL}analysis{MESSAGE}",
    close=f"{END}{START}assistant",
    opened=False,
    before_answer=f"{CHANNEL}final{MESSAGE}",
)
"""The text around an answer that follows a grammar."""


def _calls(cursor: Cursor, tools: Sequence[Tool]) -> Iterator[ParsedCall | None]:
    """Reads a region, which begins behind `to=functions.` with the name."""
    tool = tool_until(cursor, tools, " ", "<")
    cursor.until(MESSAGE)
    cursor.literal(MESSAGE)
    yield from json_arguments_of(cursor, tool)


def _grammar(rules: ToolRules, special: Mapping[str, int]) -> str:
    """Allows one call, which ends the answer, as the model itself does: a second call belongs to the next turn."""
    channel, message, constrain = (tag(text, special) for text in (CHANNEL, MESSAGE, CONSTRAIN))
    next_message = f'{tag(END, special)} {tag(START, special)} "assistant"'
    calls = call_rules(
        rules.callable,
        lambda name, arguments: (
            f"{channel} {quoted(f'commentary {TO_FUNCTIONS}{name} ')} "
            f"{constrain} {quoted('json')} {message} {arguments}"
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
    read=region_reader(_calls),
    grammar=_grammar,
    known_by=(CHANNEL, MESSAGE, "functions."),
)
_TAGS = StopStrings(TAGS)


def harmony_format(calls: CallRules | None, visible: frozenset[int] = frozenset()) -> AnswerFormat:
    return AnswerFormat(partial(HarmonyParser, calls or CallRules(HARMONY, ())), visible)


class HarmonyParser:
    """The `AnswerParser` of one choice."""

    def __init__(self, rules: CallRules) -> None:
        self._calls = ShownCalls(rules)
        self._search = StopMatcher(_TAGS)
        self._header: str | None = ""
        """The header as far as it has come; None inside a message."""
        self._region: CallRegion | None = None
        """The call under way, or what looks like one."""
        self._thinks = False
        """True if the message under way is a thought."""
        self._tokens = 0
        """Number of tokens of the message under way, with its header."""
        self._thought_tokens = 0
        """Tokens of the thoughts before it."""

    @property
    def reasoning_tokens(self) -> int:
        return self._thought_tokens + (self._tokens if self._thinks else 0)

    @property
    def called(self) -> bool:
        return self._calls.all_complete

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Part]:
        self._tokens += len(token_ids)
        parts: list[Part] = []
        while True:
            found = self._search.feed(text)
            parts += self._text(found.text)
            if found.stop is None:
                return parts
            parts += self._end(found.stop) if self._header is None else self._begin(self._header + found.stop)
            text = found.rest

    def close(self, *, cut: bool) -> list[Part]:
        parts = self._text(self._search.close())
        if self._region is not None:
            return parts + self._region.close(cut=cut)
        # An answer without any header is content; a header that has only begun after a message is dropped.
        return parts if not self._header or self._header.startswith(TAGS) else [*parts, Content(self._header)]

    def _text(self, text: str) -> list[Part]:
        if self._header is not None:
            self._header += text
            return []
        parts: list[Part] = []
        if self._region is not None:
            parts = self._region.feed(text)
            if self._region.rest is None:
                return parts
            text, self._region = self._region.rest, None
        return [*parts, Reasoning(text) if self._thinks else Content(text)] if text else parts

    def _begin(self, header: str) -> list[Part]:
        """Begins the message behind a header, if the header is whole."""
        self._header = None if header.endswith(MESSAGE) else header
        if self._header is not None:
            return []
        found = _read_header(header)
        before, to, behind = header.partition(TO_FUNCTIONS)
        if found is None or (found.current_recipient is not None and not to):
            return self._text(header)  # no header, or one to a tool that no request can bring
        if found.current_recipient is None:
            self._thinks = found.current_channel == ANALYSIS
            return []
        self._region = CallRegion(self._calls, before + to)
        return self._text(behind)

    def _end(self, tag: str) -> list[Part]:
        parts = self._region.close(cut=False) if self._region is not None else []
        if self._thinks:
            self._thought_tokens += self._tokens
        self._region, self._thinks, self._tokens = None, False, 0
        self._header = tag if tag == START else ""
        return parts


def _read_header(header: str) -> "StreamableParser | None":
    """Reads a header, its last tag included: the parser knows its channel and recipient. None if it is none."""
    from openai_harmony import HarmonyError, StreamableParser  # here: it takes 0.1 s, and most models do without

    parser = StreamableParser(_encoding(), None)
    text = header if header.startswith(START) else BEGUN + header
    try:
        for token_id in _encoding().encode(text, allowed_special="all"):
            parser.process(token_id)
    except HarmonyError:
        return None
    return parser


@cache
def _encoding() -> "HarmonyEncoding":
    """Loading it takes 0.3 s; nothing is downloaded."""
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
