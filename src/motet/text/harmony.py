"""gpt-oss, which answers in OpenAI's harmony format: messages, each with a channel and sometimes a recipient.

    <|channel|>analysis<|message|>We need ...<|end|><|start|>assistant<|channel|>final<|message|>It is ...
               Reasoning                                               Content

    <|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
                                       ToolCallBegin                           ToolCallArguments

1. `HarmonyParser` collects the header of a message up to `<|message|>`.
2. OpenAI's own parser (package `oss-harmony`) parses the header.
3. The text of the message becomes reasoning, content, or the arguments of a call, up to the next tag.

The tags are special tokens. The recipient can also precede the channel. Messages on the channel `commentary` are for
the user, so they are content, except messages to a tool. Text without a header is content.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

from motet.text.answers import CallRegion, CallRules, ForcedCalls, ShownCalls, without_content
from motet.text.parts import AnswerFormat, Content, Part, Reasoning
from motet.text.stop_strings import StopMatcher, StopStrings
from motet.text.tools.cursor import Cursor
from motet.text.tools.grammar import call_rules, document, tag
from motet.text.tools.json_formats import json_arguments_of
from motet.text.tools.tool_format import ParsedCall, Tool, ToolFormat, ToolMode, ToolRules, region_parser, tool_until
from motet.text.tools.typed import quoted
from motet.types import Thinking

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
TAGS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
TO_FUNCTIONS = "to=functions."
ANALYSIS = "analysis"
PROMPT_END = f"{START}assistant"
"""End of every prompt. The first message of an answer therefore starts without it."""
HARMONY_THINKING = Thinking(
    open=f"{CHANNEL}analysis{MESSAGE}",
    close=f"{END}{START}assistant",
    opened=False,
    before_answer=f"{CHANNEL}final{MESSAGE}",
)
"""Tags of the reasoning and the answer, for an answer with a grammar."""


def _calls(cursor: Cursor, tools: Sequence[Tool]) -> Iterator[ParsedCall | None]:
    """Parses a region. It starts with the tool's name, after `to=functions.`."""
    tool = tool_until(cursor, tools, " ", "<")
    cursor.read_until(MESSAGE)
    cursor.expect(MESSAGE)
    yield from json_arguments_of(cursor, tool)


def _grammar(rules: ToolRules, special: Mapping[str, int]) -> str:
    """Returns a grammar that allows one call. The call ends the answer, as it does without a grammar: the model
    generates a second call in its next turn."""
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
    opening_tags=TAGS,
    parse=region_parser(_calls),
    grammar=_grammar,
    template_marks=(CHANNEL, MESSAGE, "functions."),
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
        """The current header up to this point; None inside a message."""
        self._region: CallRegion | None = None
        """The current message, if it is to a tool."""
        self._is_reasoning = False
        """True if the current message is reasoning."""
        self._tokens = 0
        """Number of tokens of the current message and its header."""
        self._earlier_reasoning_tokens = 0
        """Number of tokens of earlier messages that are reasoning."""

    @property
    def reasoning_tokens(self) -> int:
        return self._earlier_reasoning_tokens + (self._tokens if self._is_reasoning else 0)

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
            parts += self._end(found.stop) if self._header is None else self._start(self._header + found.stop)
            text = found.rest

    def close(self, *, cut: bool) -> list[Part]:
        parts, forced = self._close(cut=cut), self._calls.rules.forced
        is_forced = forced is ForcedCalls.EVERYWHERE or (forced is ForcedCalls.AFTER_TAG and self._region is not None)
        return without_content(parts) if cut and is_forced else parts

    def _close(self, *, cut: bool) -> list[Part]:
        parts = self._text(self._search.close())
        if self._region is not None:
            return parts + self._region.close(cut=cut)
        # An answer without any header is content. An incomplete header after a message is dropped.
        return parts if not self._header or self._header.startswith(TAGS) else [*parts, Content(self._header)]

    def _text(self, text: str) -> list[Part]:
        """Takes the next text, without tags, of the current header or message."""
        if self._header is not None:
            self._header += text
            return []
        parts: list[Part] = []
        if self._region is not None:
            parts = self._region.feed(text)
            if self._region.rest is None:
                return parts
            text, self._region = self._region.rest, None
        return [*parts, Reasoning(text) if self._is_reasoning else Content(text)] if text else parts

    def _start(self, text: str) -> list[Part]:
        """Starts the message after a header, if the header is complete."""
        self._header = None if text.endswith(MESSAGE) else text
        if self._header is not None:
            return []
        header = _header_parser()(text)
        before, to, after = text.partition(TO_FUNCTIONS)
        if header is None or (header.has_recipient and not to):
            return self._text(text)  # not a header, or a recipient that is not a tool of a request
        if not header.has_recipient:
            self._is_reasoning = header.channel == ANALYSIS
            return []
        self._region = CallRegion(self._calls, before + to)
        return self._text(after)

    def _end(self, tag: str) -> list[Part]:
        """Ends the current message at a tag."""
        parts = self._region.close(cut=False) if self._region is not None else []
        if self._is_reasoning:
            self._earlier_reasoning_tokens += self._tokens
        self._region, self._is_reasoning, self._tokens = None, False, 0
        self._header = tag if tag == START else ""
        return parts


@dataclass(frozen=True)
class _Header:
    """The header of a message."""

    channel: str | None
    has_recipient: bool


@cache
def _header_parser() -> Callable[[str], _Header | None]:
    """Returns a function that parses a header including its last tag, and returns None for a text that is not a header.
    Importing and loading OpenAI's parser takes 0.4 s, and other models do not need it. Nothing is downloaded."""
    from openai_harmony import HarmonyEncodingName, HarmonyError, StreamableParser, load_harmony_encoding

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)

    def parse(text: str) -> _Header | None:
        message, parser = text if text.startswith(START) else PROMPT_END + text, StreamableParser(encoding, None)
        try:
            for token_id in encoding.encode(message, allowed_special="all"):
                parser.process(token_id)
        except HarmonyError:
            return None
        return _Header(parser.current_channel, parser.current_recipient is not None)

    return parse
