"""Answers of gpt-oss, written in OpenAI's harmony format: messages, each with a channel and at times a recipient.

    <|channel|>analysis<|message|>We need ...<|end|><|start|>assistant<|channel|>final<|message|>It is ...
               Reasoning                                               Content

Headers are read by OpenAI's own parser (the package `oss-harmony`). Messages on the channel `commentary` are content
(they are written for the user), unless they go to a tool. What has no header is content as it stands.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from openai_harmony import (
    HarmonyEncoding,
    HarmonyEncodingName,
    HarmonyError,
    StreamableParser,
    load_harmony_encoding,
)

from motet.text.calling import Calling, Calls
from motet.text.parts import Content, Part, Reasoning
from motet.text.stages import Stage, Step
from motet.text.stop import StopStrings
from motet.text.tags import TagSearch
from motet.text.tools.base import Tool
from motet.text.tools.harmony import HARMONY, MESSAGE, START, TAGS, TO_FUNCTIONS

ANALYSIS = "analysis"
BEGUN = f"{START}assistant"
"""What the prompt ends with: the first message of an answer lacks it."""
_TAGS = StopStrings(TAGS)


@dataclass(frozen=True, kw_only=True)
class HarmonyFormat:
    """The `AnswerFormat` of one request."""

    visible: frozenset[int]
    callable: tuple[Tool, ...] = ()
    """Tools that may be called."""
    parallel: bool = True

    def parser(self) -> "HarmonyParser":
        return HarmonyParser(Calls(HARMONY, self.callable, parallel=self.parallel))


class HarmonyParser:
    """The `AnswerParser` of one choice."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._search = TagSearch(_TAGS)
        self._header: str | None = ""
        """What has come of it; None inside a message."""
        self._message: Stage = _Saying()
        self._thinks = False
        """Whether the message under way is a thought."""
        self._tokens = 0
        """Of the message under way, its header included."""
        self._thought_tokens = 0
        """Of those before it."""

    @property
    def reasoning_tokens(self) -> int:
        return self._thought_tokens + (self._tokens if self._thinks else 0)

    @property
    def called(self) -> bool:
        return self._calls.all_whole

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Part]:
        self._tokens += len(token_ids)
        parts: list[Part] = []
        while True:
            found = self._search.feed(text)
            parts += self._text(found.text)
            if found.tag is None:
                return parts
            parts += self._tag(found.tag)
            text = found.rest

    def close(self, *, cut: bool) -> list[Part]:
        parts = self._text(self._search.close())
        if self._header is None:
            return parts + self._message.close(cut=cut)
        # An answer without any header is one all the same; a header that was begun behind a message says nothing.
        return parts if self._header.startswith(TAGS) else [*parts, *_content(self._header)]

    def _text(self, text: str) -> list[Part]:
        if self._header is not None:
            self._header += text
            return []
        step = self._message.feed(text)
        if step.next is None:
            return step.parts
        self._message = step.next
        return step.parts + self._message.feed(step.rest).parts

    def _tag(self, tag: str) -> list[Part]:
        if self._header is None:
            return self._end(tag)
        self._header += tag
        return self._begin(self._header) if tag == MESSAGE else []

    def _begin(self, header: str) -> list[Part]:
        """A message whose header is there."""
        self._header = None
        try:
            channel, recipient = _read(header)
        except HarmonyError:
            self._message = _Saying()
            return _content(header)
        self._thinks = channel == ANALYSIS and recipient is None
        if self._thinks:
            self._message = _Thinking()
            return []
        if recipient is None:
            self._message = _Saying()
            return []
        place = header.find(TO_FUNCTIONS) + len(TO_FUNCTIONS)
        if place < len(TO_FUNCTIONS):
            self._message = _Saying()
            return _content(header)  # to a tool that no request can bring
        self._message = Calling(self._calls, None, header[:place], saying=lambda _: _Saying())
        return self._text(header[place:])

    def _end(self, tag: str) -> list[Part]:
        parts = self._message.close(cut=False)
        if self._thinks:
            self._thought_tokens += self._tokens
        self._thinks, self._tokens = False, 0
        self._header = tag if tag == START else ""
        return parts


class _Thinking:
    def feed(self, text: str) -> Step:
        return Step([Reasoning(text)] if text else [])

    def close(self, *, cut: bool) -> list[Part]:
        return []


class _Saying:
    def feed(self, text: str) -> Step:
        return Step(_content(text))

    def close(self, *, cut: bool) -> list[Part]:
        return []


def _content(text: str) -> list[Part]:
    return [Content(text)] if text else []


def _read(header: str) -> tuple[str | None, str | None]:
    """(channel, recipient) of a header, its last tag included. Raises `HarmonyError`."""
    parser = StreamableParser(_encoding(), None)
    text = header if header.startswith(START) else BEGUN + header
    for token_id in _encoding().encode(text, allowed_special="all"):
        parser.process(token_id)
    return parser.current_channel, parser.current_recipient


@cache
def _encoding() -> HarmonyEncoding:
    """Loading it takes 0.3 s; nothing is downloaded."""
    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
