"""A region of tool calls in an answer: read again as it grows, told as far as it is sure.

A call is told, its name first, once its arguments have begun; what comes then is told as it comes. What turns out to
be no call is content, tags and all, but for the whole calls before it; what was told of a call stays told.

The region is read at lengths that depend on nothing but the length: each longer than the one before by a sixteenth.
So the work is linear, and what is told does not depend on how the text was cut.
"""

from collections.abc import Callable, Sequence

from motet.text.parts import Content, Part, ToolCallArguments, ToolCallBegin
from motet.text.stages import Stage, Step
from motet.text.stop import StopStrings
from motet.text.tags import TagSearch
from motet.text.tools.base import ReadCall, Reading, Tool, ToolFormat

LEAST_GROWTH = 4
"""Characters before a region is read again: about a token."""
MOST_TAGS_IN_STRINGS = 16
"""Closing tags of one region that may be text in a string: each has the region read, and the work is to stay linear."""


class Calls:
    """What was told of the calls of one choice, all regions together."""

    def __init__(self, form: ToolFormat, tools: Sequence[Tool], *, parallel: bool) -> None:
        """`parallel`: without, only the first is told; those behind it are dropped, as vLLM does."""
        self.form = form
        self.tools = tools
        self.num_begun = 0
        self._most = None if parallel else 1
        self._told: list[int] = []
        """Of each call: characters of its arguments."""
        self._whole: set[int] = set()

    @property
    def all_whole(self) -> bool:
        """Whether there are any, and none was begun only."""
        return 0 < self.num_begun == len(self._whole)

    def tell(self, number: int, call: ReadCall) -> list[Part]:
        """What is new of a call that begins with its arguments."""
        if not call.arguments or (self._most is not None and number >= self._most):
            return []
        parts: list[Part] = []
        if number == self.num_begun:
            self.num_begun += 1
            self._told.append(0)
            parts.append(ToolCallBegin(number, self.form.new_call_id(), call.name))
        if new := call.arguments[self._told[number] :]:
            self._told[number] = len(call.arguments)
            parts.append(ToolCallArguments(number, new))
        if call.whole:
            self._whole.add(number)
        return parts


class Calling:
    """From a tag that opens calls to one that closes them."""

    def __init__(self, calls: Calls, ends: StopStrings | None, begun: str, *, saying: Callable[[bool], Stage]) -> None:
        """`begun`: the opening tag, and white space before it, as it is shown if this is no call. `saying`: what
        follows, given whether it stands behind a tag."""
        self._calls = calls
        self._first = calls.num_begun
        self._begun = begun
        self._search = TagSearch(ends)
        self._saying = saying
        self._pieces: list[str] = []
        self._length = 0
        self._next_read = LEAST_GROWTH
        self._tags_left = MOST_TAGS_IN_STRINGS

    def feed(self, text: str) -> Step:
        parts: list[Part] = []
        while True:
            found = self._search.feed(text)
            behind = self._grow(found.text, parts)
            if behind is not None:
                held = self._search.close() if found.tag is None else found.tag + found.rest
                return Step([*parts, self._as_content()], behind + held, self._saying(False))
            if found.tag is None:
                return Step(parts)
            if step := self._end(found.tag):
                return Step(parts + step.parts, found.rest, step.next)
            text = found.rest

    def close(self, *, cut: bool) -> list[Part]:
        reading, begun_tag = self._read(final=True), self._search.close()
        parts = self._tell(reading)
        if not reading.malformed and _all_whole(reading):
            return parts  # and what is begun behind it would have become the closing tag
        behind = self._grow(begun_tag, parts)
        if behind is not None:
            return [*parts, self._as_content(), Content(behind)] if behind else [*parts, self._as_content()]
        reading = self._read(final=not cut)
        parts += self._tell(reading)
        begun = cut and any(call.arguments for call in reading.calls)
        if reading.malformed or not (begun or _all_whole(reading)):
            parts.append(self._as_content())
        return parts

    def _grow(self, text: str, parts: list[Part]) -> str | None:
        """Reads on. Not None: this is no call, and so much of `text` was not looked at."""
        while self._length + len(text) >= self._next_read:
            size = self._next_read - self._length
            self._add(text[:size])
            text = text[size:]
            self._next_read = self._length + max(LEAST_GROWTH, self._length // 16)
            reading = self._read(final=False)
            parts += self._tell(reading)
            if reading.malformed:
                return text
        self._add(text)
        return None

    def _add(self, text: str) -> None:
        self._pieces.append(text)
        self._length += len(text)

    def _end(self, tag: str) -> Step | None:
        """At a closing tag. None: it stands in a string, and the region goes on."""
        reading = self._read(final=True)
        if not reading.malformed and _all_whole(reading):
            return Step(self._tell(reading), "", self._saying(True))
        if self._tags_left:
            longer = self._read(final=False, more=tag)
            if not longer.malformed and not _all_whole(longer):
                self._tags_left -= 1
                self._add(tag)
                return None
        parts = self._tell(reading)
        self._add(tag)
        return Step([*parts, self._as_content()], "", self._saying(False))

    def _read(self, *, final: bool, more: str = "") -> Reading:
        text = "".join(self._pieces)
        self._pieces = [text]
        return self._calls.form.read(text + more, final, self._calls.tools)

    def _tell(self, reading: Reading) -> list[Part]:
        return [
            part for place, call in enumerate(reading.calls) for part in self._calls.tell(self._first + place, call)
        ]

    def _as_content(self) -> Content:
        """What is no call, behind those that are."""
        text = "".join(self._pieces)
        taken = self._calls.form.read(text, False, self._calls.tools).taken
        return Content(text[taken:] if taken else self._begun + text)


def _all_whole(reading: Reading) -> bool:
    return bool(reading.calls) and all(call.whole for call in reading.calls)
