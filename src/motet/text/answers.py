"""Answers in which tags tell what is what: thoughts first, then content and calls of tools.

    <think> ... </think>  content  <tool_call> ... </tool_call>  content
    ThoughtReader         ContentReader
                                   CallRegion

Thoughts stand at the beginning and nowhere else; the first closing tag ends them, and an opening tag within or behind
them is text. White space between a tag and the text beside it is dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from motet.text.parts import AnswerFormat, Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from motet.text.reasoning import ReasoningTags
from motet.text.stop_strings import StopMatcher, StopStrings
from motet.text.tools.cursor import Cursor
from motet.text.tools.tool_format import ParsedCall, ParsedRegion, Tool, ToolFormat

MIN_GROWTH = 4
"""Number of new characters, about a token, after which a region of calls is read again at the earliest."""
MAX_TAGS_IN_STRINGS = 16
"""At most this many closing tags of one region may be text in a string: for each the region is read once more."""


class ThoughtState(Enum):
    """Where an answer stands in its thoughts."""

    MAY_COME = auto()
    OPENED = auto()
    """The opening tag has just come."""
    UNDER_WAY = auto()
    OVER = auto()


@dataclass(frozen=True)
class ThoughtRules:
    """How thoughts are marked in the answers of a request."""

    tags: ReasoningTags
    at_start: ThoughtState
    """The state when the prompt ends."""
    separate: bool
    """False: thoughts are shown as content, but their tokens are counted."""


@dataclass(frozen=True)
class CallRules:
    """How the answers of a request call tools."""

    form: ToolFormat
    callable: tuple[Tool, ...]
    parallel: bool = True
    """False: only the first call is shown, and those behind it are dropped, as vLLM does."""


def tagged_format(
    thoughts: ThoughtRules | None, calls: CallRules | None, *, visible: frozenset[int] = frozenset()
) -> AnswerFormat:
    tags = (
        *(calls.form.begins if calls else ()),
        *(thoughts.tags.around_answer if thoughts and thoughts.separate else ()),
    )
    return AnswerFormat(partial(TaggedParser, thoughts, calls, content_ends=StopStrings(tags)), visible)


class TaggedParser:
    """The `AnswerParser` of one choice."""

    def __init__(self, thoughts: ThoughtRules | None, calls: CallRules | None, *, content_ends: StopStrings) -> None:
        """`content_ends`: tags that open calls, and those around the content, which are not shown."""
        self._thoughts = ThoughtReader(thoughts) if thoughts and thoughts.at_start is not ThoughtState.OVER else None
        self._tokens = 0
        """Number of tokens up to the end of the thoughts."""
        self._calls = ShownCalls(calls) if calls else None
        self._content = ContentReader(self._calls, content_ends)

    @property
    def reasoning_tokens(self) -> int:
        return self._tokens if self._thoughts and self._thoughts.begun else 0

    @property
    def called(self) -> bool:
        return self._calls is not None and self._calls.all_whole

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Part]:
        thoughts = self._thoughts
        if thoughts is None or thoughts.over:
            return self._content.feed(text)
        self._tokens += len(token_ids)
        parts, behind = thoughts.feed(text)
        if behind is None:
            return parts
        if thoughts.begun and thoughts.separate:
            self._content.follow_tag()
        return parts + self._content.feed(behind)

    def close(self, *, cut: bool) -> list[Part]:
        if self._thoughts is None or self._thoughts.over:
            return self._content.close(cut=cut)
        return self._thoughts.close()


class ThoughtReader:
    """Reads white space and an opening tag, if there is one, then thoughts up to the first closing tag."""

    def __init__(self, rules: ThoughtRules) -> None:
        self.separate = rules.separate
        self.begun = rules.at_start is not ThoughtState.MAY_COME
        """True if there are thoughts."""
        self.over = False
        self._opens = rules.tags.opens
        self._held = ""
        """White space, and text that may still become an opening tag."""
        self._search = StopMatcher(rules.tags.close_tags)
        self._margins = Margins(after_tag=rules.at_start is not ThoughtState.UNDER_WAY)

    def feed(self, text: str) -> tuple[list[Part], str | None]:
        """Returns thoughts, and the text behind them once they are over."""
        shown: list[Part] = []
        if not self.begun:
            self._held += text
            begun = self._held.lstrip()
            tag = next((tag for tag in self._opens if begun.startswith(tag)), None)
            if tag is None:
                self.over = not any(tag.startswith(begun) for tag in self._opens)
                return [], self._held if self.over else None
            self.begun = True
            text = begun[len(tag) :]
            if not self.separate:
                shown = _content(self._held[: len(self._held) - len(text)])
        found = self._search.feed(text)
        self.over = found.stop is not None
        if self.separate:
            shown = _reasoning(self._margins.feed(found.text))
        else:
            shown += _content(text[: len(text) - len(found.rest)])
        return shown, found.rest if self.over else None

    def close(self) -> list[Part]:
        if not self.begun:
            return _content(self._held)
        if not self.separate:
            return []
        return _reasoning(self._margins.feed(self._search.close()) + self._margins.close())


class ContentReader:
    """Reads content, and the regions of calls in it."""

    def __init__(self, calls: "ShownCalls | None", ends: StopStrings) -> None:
        self._calls = calls
        self._bare = calls.rules.form.bare if calls else None
        """A character that opens calls if the text begins with it; None once the text has begun."""
        self._region: CallRegion | None = None
        self._search = StopMatcher(ends)
        self._margins = Margins(after_tag=False, before_tag=ends.longest > 0)

    def follow_tag(self) -> None:
        """A tag has been read: white space at the beginning of the next text is dropped."""
        self._margins = Margins(after_tag=True, before_tag=self._margins.before_tag)

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while text:
            if self._region is not None:
                parts += self._region.feed(text)
                if self._region.rest is None:
                    break
                text, closed = self._region.rest, self._region.closed
                self._region, self._margins = None, Margins(after_tag=closed)
                continue
            if self._bare is not None and (begun := text.lstrip()):
                bare, self._bare = self._bare, None
                if begun.startswith(bare):
                    self._margins.feed(text.removesuffix(begun))
                    self._open("")
                    text = begun
                    continue
            found = self._search.feed(text)
            parts += _content(self._margins.feed(found.text))
            if found.stop is None:
                break
            self._open(found.stop)
            text = found.rest
        return parts

    def close(self, *, cut: bool) -> list[Part]:
        if self._region is not None:
            return self._region.close(cut=cut)
        return _content(self._margins.feed(self._search.close()) + self._margins.close())

    def _open(self, tag: str) -> None:
        """Begins a region of calls (bare calls have no tag), or drops a tag that stands around the content."""
        space = self._margins.close()
        if self._calls is not None and tag in ("", *self._calls.rules.form.begins):
            self._region = CallRegion(self._calls, space + tag)
        else:
            self.follow_tag()


class ShownCalls:
    """Remembers how much of each call of one choice has been shown, in all its regions.

    A call is shown, its name first, once its arguments have begun; from then on they are shown as they come.
    """

    def __init__(self, rules: CallRules) -> None:
        self.rules = rules
        self.shown: list[int] = []
        """For each call, the number of characters of its arguments that were shown."""
        self._whole: set[int] = set()

    @property
    def all_whole(self) -> bool:
        """True if there are calls, and each of them is whole."""
        return 0 < len(self.shown) == len(self._whole)

    def show(self, number: int, call: ParsedCall) -> list[Part]:
        """Returns the parts of a call that have not been shown yet."""
        if not call.arguments or (number and not self.rules.parallel):
            return []
        parts: list[Part] = []
        if number == len(self.shown):
            self.shown.append(0)
            parts.append(ToolCallBegin(number, self.rules.form.new_call_id(), call.name))
        if new := call.arguments[self.shown[number] :]:
            self.shown[number] = len(call.arguments)
            parts.append(ToolCallArguments(number, new))
        if call.whole:
            self._whole.add(number)
        return parts


class CallRegion:
    """A region of calls, from a tag that opens it to one that closes it.

    Text that turns out to be no call becomes content, with its tags, except for whole calls before it; parts of a call
    that were shown stay shown. The region is read again whenever it has grown by a sixteenth, wherever pieces end. So
    the work is linear, and the parts do not depend on how the text was cut.
    """

    def __init__(self, calls: ShownCalls, begun: str) -> None:
        """`begun`: the opening tag with the white space before it, which is shown if this is no call."""
        self.rest: str | None = None
        """Text behind the region; None while it goes on."""
        self.closed = False
        """True if a tag has closed it."""
        self._calls = calls
        self._first = len(calls.shown)
        self._begun = begun
        self._search = StopMatcher(calls.rules.form.end_tags)
        self._pieces: list[str] = []
        self._length = 0
        self._next_read = MIN_GROWTH
        self._tags_left = MAX_TAGS_IN_STRINGS

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while self.rest is None:
            found = self._search.feed(text)
            unread = self._grow(found.text, parts)
            if unread is not None:
                held = self._search.close() if found.stop is None else found.stop + found.rest
                parts += self._end_as_content(unread + held)
            elif found.stop is None:
                break
            else:
                parts += self._meet_tag(found.stop, found.rest)
                text = found.rest
        return parts

    def close(self, *, cut: bool) -> list[Part]:
        region, begun_tag = self._read(final=True), self._search.close()
        parts = self._show(region)
        if region.whole:
            return parts  # text after the last call was the beginning of a closing tag
        unread = self._grow(begun_tag, parts)
        if unread is None:
            region = self._read(final=not cut)
            parts += self._show(region)
            if region.whole or (cut and not region.malformed and any(call.arguments for call in region.calls)):
                return parts
        return [*parts, *self._end_as_content(""), *_content(unread or "")]

    def _grow(self, text: str, parts: list[Part]) -> str | None:
        """Reads on. If this is no call, returns the part of `text` that it has not looked at, else None."""
        while self._length + len(text) >= self._next_read:
            size = self._next_read - self._length
            self._add(text[:size])
            text = text[size:]
            self._next_read = self._length + max(MIN_GROWTH, self._length // 16)
            region = self._read(final=False)
            parts += self._show(region)
            if region.malformed:
                return text
        self._add(text)
        return None

    def _add(self, text: str) -> None:
        self._pieces.append(text)
        self._length += len(text)

    def _meet_tag(self, tag: str, rest: str) -> list[Part]:
        """Ends the region at a closing tag, unless the tag stands in a string."""
        region = self._read(final=True)
        if region.whole:
            self.rest, self.closed = rest, True
            return self._show(region)
        if self._tags_left:
            longer = self._read(final=False, more=tag)
            if not longer.malformed and not longer.whole:
                self._tags_left -= 1
                self._add(tag)
                return []
        parts = self._show(region)
        self._add(tag)
        return parts + self._end_as_content(rest)

    def _read(self, *, final: bool, more: str = "") -> ParsedRegion:
        text = "".join(self._pieces)
        self._pieces = [text]
        return self._calls.rules.form.read(Cursor(text + more, final=final), self._calls.rules.callable)

    def _show(self, region: ParsedRegion) -> list[Part]:
        return [part for place, call in enumerate(region.calls) for part in self._calls.show(self._first + place, call)]

    def _end_as_content(self, rest: str) -> list[Part]:
        """Ends the region: text after its whole calls is no call, and becomes content."""
        self.rest = rest
        taken = self._read(final=False).taken
        text = "".join(self._pieces)
        return [Content(text[taken:] if taken else self._begun + text)]


class Margins:
    """Drops the white space between a text and the tags around it; white space inside the text stays."""

    def __init__(self, *, after_tag: bool, before_tag: bool = True) -> None:
        """`after_tag`: a tag stands before the text. `before_tag`: one may follow."""
        self._after_tag = after_tag
        self.before_tag = before_tag
        self._held = ""

    def feed(self, text: str) -> str:
        """Returns the text that may be shown. White space is held until it is known if a tag follows."""
        if self._after_tag:
            text = text.lstrip()
            self._after_tag = not text
        if not self.before_tag:
            return text
        body = text.rstrip()
        if not body:
            self._held += text
            return ""
        shown, self._held = self._held + body, text[len(body) :]
        return shown

    def close(self) -> str:
        """Returns the white space at the end of the text, which belongs to it unless a tag follows."""
        held, self._held = self._held, ""
        return held


def _content(text: str) -> list[Part]:
    return [Content(text)] if text else []


def _reasoning(text: str) -> list[Part]:
    return [Reasoning(text)] if text else []
