"""The stages of an answer with tags, one after the other; each knows what it shows, where it ends and what follows.

Beginning ──► Thinking ──► Saying ◄──► Calling (text.calling)
    └────── no thoughts ─────▲
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from motet.text.parts import Content, Part, Reasoning
from motet.text.stop import StopStrings
from motet.text.tags import Margins, TagSearch


class Step(msgspec.Struct, frozen=True, gc=False):
    """What a piece of text came to."""

    parts: list[Part]
    rest: str = ""
    """For the next stage."""
    next: "Stage | None" = None
    """None: the piece was taken whole, and the stage goes on."""


class Stage(Protocol):
    def feed(self, text: str) -> Step: ...

    def close(self, *, cut: bool) -> list[Part]:
        """The answer is over. `cut`: not by the model, so what has begun may lack its end."""
        ...


class Beginning:
    """White space, and what may still become an opening tag."""

    def __init__(
        self, opens: tuple[str, ...], *, thinking: Callable[[str], Stage], saying: Callable[[], Stage]
    ) -> None:
        """`thinking`: what follows an opening tag, given all that came up to its end."""
        self._opens = opens
        self._thinking = thinking
        self._saying = saying
        self._held = ""

    def feed(self, text: str) -> Step:
        self._held += text
        begun = self._held.lstrip()
        for tag in self._opens:
            if begun.startswith(tag):
                rest = begun[len(tag) :]
                return Step([], rest, self._thinking(self._held[: len(self._held) - len(rest)]))
        if any(tag.startswith(begun) for tag in self._opens):
            return Step([])
        return Step([], self._held, self._saying())

    def close(self, *, cut: bool) -> list[Part]:
        return [Content(self._held)] if self._held else []


class Thinking:
    """Thoughts, up to the first closing tag."""

    def __init__(self, closes: StopStrings, *, after_tag: bool, saying: Callable[[], Stage]) -> None:
        self._search = TagSearch(closes)
        self._margins = Margins(after_tag=after_tag)
        self._saying = saying

    def feed(self, text: str) -> Step:
        found = self._search.feed(text)
        shown = self._margins.feed(found.text)
        parts: list[Part] = [Reasoning(shown)] if shown else []
        return Step(parts) if found.tag is None else Step(parts, found.rest, self._saying())

    def close(self, *, cut: bool) -> list[Part]:
        rest = self._margins.feed(self._search.close()) + self._margins.close()
        return [Reasoning(rest)] if rest else []


class ThinkingAloud:
    """Thoughts that the request wants as content: all as it comes, tags and white space too."""

    def __init__(self, closes: StopStrings, *, before: str, saying: Callable[[], Stage]) -> None:
        self._search = TagSearch(closes)
        self._before = before
        """What came up to here."""
        self._saying = saying

    def feed(self, text: str) -> Step:
        found = self._search.feed(text)
        shown = self._before + found.text + (found.tag or "")
        self._before = ""
        parts: list[Part] = [Content(shown)] if shown else []
        return Step(parts) if found.tag is None else Step(parts, found.rest, self._saying())

    def close(self, *, cut: bool) -> list[Part]:
        rest = self._before + self._search.close()
        return [Content(rest)] if rest else []


class Saying:
    """Content, up to a tag that opens calls."""

    def __init__(
        self,
        begins: StopStrings | None,
        *,
        after_tag: bool,
        calling: Callable[[str], Stage] | None = None,
        dropped: frozenset[str] = frozenset(),
        bare: str | None = None,
    ) -> None:
        """`calling`: what follows a tag, given the tag and the white space before it. `dropped`: tags that are no part
        of the text. `bare`: a character that opens calls if the text begins with it."""
        self._search = TagSearch(begins)
        self._after_tag = after_tag
        self._holds = begins is not None
        self._margins = Margins(after_tag=after_tag, before_tag=self._holds)
        self._calling = calling
        self._dropped = dropped
        self._bare = bare
        self._blank = ""
        """White space at the beginning, while a bracket may follow."""

    def feed(self, text: str) -> Step:
        if self._bare is not None:
            return self._begin(self._blank + text, self._bare)
        found = self._search.feed(text)
        shown = self._margins.feed(found.text)
        parts: list[Part] = [Content(shown)] if shown else []
        if found.tag is None:
            return Step(parts)
        before = self._margins.close()
        if found.tag in self._dropped or not self._calling:
            self._after_tag, self._margins = True, Margins(after_tag=True)
            return Step(parts, found.rest, self)
        return Step(parts, found.rest, self._calling(before + found.tag))

    def _begin(self, text: str, bare: str) -> Step:
        begun = text.lstrip()
        if not begun:
            self._blank = text
            return Step([])
        self._bare, self._blank = None, ""
        if begun.startswith(bare) and self._calling:
            before = "" if self._after_tag else text[: len(text) - len(begun)]
            return Step([], begun, self._calling(before))
        return self.feed(text)

    def close(self, *, cut: bool) -> list[Part]:
        blank = "" if self._after_tag else self._blank
        rest = blank + self._margins.feed(self._search.close()) + self._margins.close()
        return [Content(rest)] if rest else []
