"""Answers whose parts are separated by tags: reasoning first, then content and tool calls.

    <think> ... </think>  content  <tool_call> ... </tool_call>  content
    ReasoningReader       ContentReader
                                   CallRegion

Reasoning is only at the start of an answer. The first closing tag ends it; an opening tag in the reasoning or after it
is text. White space between a tag and the text next to it is dropped.
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
"""Minimum number of new characters, about a token, after which a region of calls is parsed again."""
MAX_TAGS_IN_STRINGS = 16
"""Maximum number of closing tags of one region that can be text in a string. Each costs one more parse."""


class ReasoningState(Enum):
    """The state of the reasoning at the end of the prompt."""

    POSSIBLE = auto()
    """The answer can start with reasoning."""
    OPENED = auto()
    """The prompt ends with the opening tag."""
    STARTED = auto()
    """The prompt ends within the reasoning."""
    ENDED = auto()
    """The answer has no reasoning."""


@dataclass(frozen=True)
class ReasoningRules:
    """The reasoning in the answers of a request."""

    tags: ReasoningTags
    at_start: ReasoningState
    separate: bool
    """True if reasoning is separated from the content. If not, it is content, but its tokens are counted."""


class ForcedCalls(Enum):
    """Where the grammar of a request allows only tool calls. Other text there is the start of a call."""

    NOWHERE = auto()
    """The request has no grammar with calls."""
    AFTER_TAG = auto()
    """After the opening tag of the format, and after the first character of calls without a tag."""
    OR_JSON = auto()
    """The answer is either calls or JSON."""
    EVERYWHERE = auto()
    """The answer has reasoning and calls, and nothing else."""


@dataclass(frozen=True)
class CallRules:
    """The tool calls in the answers of a request."""

    form: ToolFormat
    callable: tuple[Tool, ...]
    parallel: bool = True
    """True if an answer can have several calls. If not, calls after the first one are dropped, as in vLLM."""
    forced: ForcedCalls = ForcedCalls.NOWHERE
    """An answer that is cut off before the arguments of a forced call start does not show the call."""


def tagged_format(
    reasoning: ReasoningRules | None, calls: CallRules | None, *, visible: frozenset[int] = frozenset()
) -> AnswerFormat:
    tags = (
        *(calls.form.opening_tags if calls else ()),
        *(reasoning.tags.content_tags if reasoning and reasoning.separate else ()),
    )
    return AnswerFormat(partial(TaggedParser, reasoning, calls, content_ends=StopStrings(tags)), visible)


class TaggedParser:
    """The `AnswerParser` of one choice."""

    def __init__(self, reasoning: ReasoningRules | None, calls: CallRules | None, *, content_ends: StopStrings) -> None:
        """`content_ends`: the tags that end a piece of content: opening tags of calls, and tags around the content."""
        self._reasoning = ReasoningReader(reasoning) if reasoning else None
        self._tokens = 0
        """Number of tokens up to the end of the reasoning, with its tags."""
        self._calls = ShownCalls(calls) if calls else None
        self._content = ContentReader(self._calls, content_ends)

    @property
    def reasoning_tokens(self) -> int:
        return self._tokens if self._reasoning and self._reasoning.started else 0

    @property
    def called(self) -> bool:
        return self._calls is not None and self._calls.all_complete

    def feed(self, text: str, token_ids: Sequence[int]) -> list[Part]:
        reasoning = self._reasoning
        if reasoning is None or reasoning.ended:
            return self._content.feed(text)
        self._tokens += len(token_ids)
        parts, rest = reasoning.feed(text)
        if rest is None:
            return parts
        if reasoning.started and reasoning.separate:
            self._content.follow_tag()
        return parts + self._content.feed(rest)

    def close(self, *, cut: bool) -> list[Part]:
        if self._reasoning is None or self._reasoning.ended:
            parts = self._content.close(cut=cut)
        else:
            parts = self._reasoning.close()
        return without_content(parts) if cut and self._content.ends_in_forced_call(parts) else parts


class ReasoningReader:
    """Reads white space and an opening tag, if any, and then reasoning up to the first closing tag."""

    def __init__(self, rules: ReasoningRules) -> None:
        self.separate = rules.separate
        self.started = rules.at_start is not ReasoningState.POSSIBLE
        """True once the reasoning has started."""
        self.ended = rules.at_start is ReasoningState.ENDED
        self._opens = rules.tags.opening_tags
        self._held = ""
        """White space, and text that can still become an opening tag."""
        self._search = StopMatcher(rules.tags.close_tags)
        self._margins = Margins(after_tag=rules.at_start is not ReasoningState.STARTED)

    def feed(self, text: str) -> tuple[list[Part], str | None]:
        """Returns the new reasoning, and the text after the reasoning; None while the reasoning has not ended."""
        shown: list[Part] = []
        if not self.started:
            self._held += text
            stripped = self._held.lstrip()
            tag = next((tag for tag in self._opens if stripped.startswith(tag)), None)
            if tag is None:
                self.ended = not any(tag.startswith(stripped) for tag in self._opens)
                return [], self._held if self.ended else None
            self.started = True
            text = stripped[len(tag) :]
            if not self.separate:
                shown = _content(self._held[: len(self._held) - len(text)])
        found = self._search.feed(text)
        self.ended = found.stop is not None
        if self.separate:
            shown = _reasoning(self._margins.feed(found.text))
        else:
            shown += _content(text[: len(text) - len(found.rest)])
        return shown, found.rest if self.ended else None

    def close(self) -> list[Part]:
        if not self.started:
            return _content(self._held)
        if not self.separate:
            return []
        return _reasoning(self._margins.feed(self._search.close()) + self._margins.close())


class ContentReader:
    """Reads content, and the regions of tool calls in it."""

    def __init__(self, calls: "ShownCalls | None", ends: StopStrings) -> None:
        self._calls = calls
        self._bare = calls.rules.form.bare if calls else None
        """Character that opens a region of calls at the start of the text; None after the start."""
        self._region: CallRegion | None = None
        self._tag = ""
        """Tag that opened the region; empty if calls have no tags."""
        self._has_content = False
        self._search = StopMatcher(ends)
        self._margins = Margins(after_tag=False, before_tag=ends.longest > 0)

    def follow_tag(self) -> None:
        """Drops white space at the start of the next text, since a tag has been read."""
        self._margins = Margins(after_tag=True, before_tag=self._margins.before_tag)

    def ends_in_forced_call(self, last: Sequence[Part]) -> bool:
        """Returns True if the content in `last`, the parts held back at the end, is the start of a forced call."""
        if self._calls is None:
            return False
        is_open, first_tag = self._region is not None, self._calls.rules.form.opening_tags[0]
        match self._calls.rules.forced:
            case ForcedCalls.AFTER_TAG:
                return is_open and self._tag in ("", first_tag)
            case ForcedCalls.OR_JSON:
                text = "".join(part.text for part in last if isinstance(part, Content)).lstrip()
                return not self._has_content and (text.startswith("<") or (is_open and self._tag == first_tag))
            case forced:
                return forced is ForcedCalls.EVERYWHERE

    def feed(self, text: str) -> list[Part]:
        parts = self._feed(text)
        self._has_content = self._has_content or any(isinstance(part, Content) for part in parts)
        return parts

    def _feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while text:
            if self._region is not None:
                parts += self._region.feed(text)
                if self._region.rest is None:
                    break
                text, closed = self._region.rest, self._region.closed
                self._region, self._margins = None, Margins(after_tag=closed)
                continue
            if self._bare is not None and (stripped := text.lstrip()):
                bare, self._bare = self._bare, None
                if stripped.startswith(bare):
                    self._margins.feed(text.removesuffix(stripped))
                    self._open("")
                    text = stripped
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
        """Opens a region of calls, or drops a tag around the content. `tag`: empty if calls have no tags."""
        space = self._margins.close()
        if self._calls is not None and tag in ("", *self._calls.rules.form.opening_tags):
            self._region, self._tag = CallRegion(self._calls, space + tag), tag
        else:
            self.follow_tag()


class ShownCalls:
    """The calls of one choice, in all its regions. A call is shown, with its name, when its arguments start; then its
    arguments are shown as they arrive."""

    def __init__(self, rules: CallRules) -> None:
        self.rules = rules
        self.shown: list[int] = []
        """Number of characters of each call's arguments that were shown."""
        self._complete: set[int] = set()

    @property
    def all_complete(self) -> bool:
        """True if there are calls, and each of them is complete."""
        return 0 < len(self.shown) == len(self._complete)

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
        if call.complete:
            self._complete.add(number)
        return parts


class CallRegion:
    """A region of tool calls, from a tag that opens it to a tag that closes it.

    Text that cannot be parsed as a call becomes content, with its tags; complete calls before this text stay calls.
    Parts of a call that were shown are not withdrawn. The region is parsed again each time its length has grown by a
    sixteenth. So the total time is linear, and the parts do not depend on the pieces in which the text arrives."""

    def __init__(self, calls: ShownCalls, opening: str) -> None:
        """`opening`: the opening tag with the white space before it, which is shown if the region is not a call."""
        self.rest: str | None = None
        """Text after the region; None while it is open."""
        self.closed = False
        """True if a tag has closed the region."""
        self._calls = calls
        self._first = len(calls.shown)
        self._opening = opening
        self._search = StopMatcher(calls.rules.form.end_tags)
        self._pieces: list[str] = []
        self._length = 0
        self._next_read = MIN_GROWTH
        self._tags_left = MAX_TAGS_IN_STRINGS

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        while self.rest is None:
            found = self._search.feed(text)
            if (unread := self._grow(found.text, parts)) is not None:
                held = self._search.close() if found.stop is None else found.stop + found.rest
                parts += self._end_as_content(unread + held)
            elif found.stop is None:
                break
            else:
                parts += self._read_tag(found.stop, found.rest)
                text = found.rest
        return parts

    def close(self, *, cut: bool) -> list[Part]:
        region, partial_tag = self._read(final=True), self._search.close()
        parts = self._show(region)
        if region.complete:
            return parts  # text after the last call was the start of a closing tag
        if (unread := self._grow(partial_tag, parts)) is None:
            region = self._read(final=not cut)
            parts += self._show(region)
            if region.complete or (cut and not region.malformed and any(call.arguments for call in region.calls)):
                return parts
        return [*parts, *self._end_as_content(""), *_content(unread or "")]

    def _grow(self, text: str, parts: list[Part]) -> str | None:
        """Adds text to the region. If the region turns out not to be a call, returns the rest of `text`, else None."""
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

    def _read_tag(self, tag: str, rest: str) -> list[Part]:
        """Ends the region at a closing tag, unless the tag is part of a string."""
        region = self._read(final=True)
        if region.complete:
            self.rest, self.closed = rest, True
            return self._show(region)
        if self._tags_left:
            longer = self._read(final=False, more=tag)
            if not longer.malformed and not longer.complete:
                self._tags_left -= 1
                self._add(tag)
                return []
        parts = self._show(region)
        self._add(tag)
        return parts + self._end_as_content(rest)

    def _read(self, *, final: bool, more: str = "") -> ParsedRegion:
        text = "".join(self._pieces)
        self._pieces = [text]
        return self._calls.rules.form.parse(Cursor(text + more, final=final), self._calls.rules.callable)

    def _show(self, region: ParsedRegion) -> list[Part]:
        return [part for place, call in enumerate(region.calls) for part in self._calls.show(self._first + place, call)]

    def _end_as_content(self, rest: str) -> list[Part]:
        """Ends the region: text after its complete calls is not a call, and becomes content."""
        self.rest = rest
        taken = self._read(final=False).num_parsed
        text = "".join(self._pieces)
        return [Content(text[taken:] if taken else self._opening + text)]


class Margins:
    """Drops the white space between a text and the tags around it. White space inside the text is kept."""

    def __init__(self, *, after_tag: bool, before_tag: bool = True) -> None:
        """`after_tag`: True if the text follows a tag. `before_tag`: True if a tag can follow the text."""
        self._after_tag = after_tag
        self.before_tag = before_tag
        self._held = ""

    def feed(self, text: str) -> str:
        """Returns the text that can be shown. White space is held until the text after it is known."""
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
        """Returns held white space at the end of the answer, where no tag follows."""
        held, self._held = self._held, ""
        return held


def without_content(parts: Sequence[Part]) -> list[Part]:
    return [part for part in parts if not isinstance(part, Content)]


def _content(text: str) -> list[Part]:
    return [Content(text)] if text else []


def _reasoning(text: str) -> list[Part]:
    return [Reasoning(text)] if text else []
