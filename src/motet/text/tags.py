"""Finds tags in text that arrives in pieces, whatever the pieces; and drops the white space that stands beside them.

What may still become a tag is held back, and nothing else (the automaton of `text.stop`). Behind a tag something else
is looked for, so the search ends there.
"""

import msgspec

from motet.text.stop import StopMatcher, StopStrings


class Found(msgspec.Struct, frozen=True, gc=False):
    """The next of the text."""

    text: str
    tag: str | None = None
    """What stands behind `text`; None: no tag is there yet, and all that came was taken."""
    rest: str = ""
    """Behind the tag."""


class TagSearch:
    """Looks for the first of some tags."""

    def __init__(self, tags: StopStrings | None) -> None:
        """None: there is nothing to look for."""
        self._matcher = StopMatcher(tags) if tags else None

    def feed(self, piece: str) -> Found:
        """Behind a tag the search may go on, with the rest."""
        matcher = self._matcher
        if matcher is None or matcher.passes(piece):
            return Found(piece)
        held = matcher.num_held
        released = matcher.feed(piece)
        if released.stop is None:
            return Found(released.text)
        matcher.close()
        return Found(released.text[: released.kept], released.stop, piece[len(released.text) - held :])

    def close(self) -> str:
        """The text is over: what was held is no tag."""
        return self._matcher.close() if self._matcher else ""


class Margins:
    """Text without the white space between it and the tags around it; that within stays."""

    def __init__(self, *, after_tag: bool, before_tag: bool = True) -> None:
        """Whether a tag stands before the text, and whether one may follow."""
        self._after_tag = after_tag
        self._before_tag = before_tag
        self._held = ""

    def feed(self, text: str) -> str:
        """What may be shown: white space waits until it is known whether a tag follows."""
        if self._after_tag:
            text = text.lstrip()
            self._after_tag = not text
        if not self._before_tag:
            return text
        body = text.rstrip()
        if not body:
            self._held += text
            return ""
        shown, self._held = self._held + body, text[len(body) :]
        return shown

    def close(self) -> str:
        """The text is over: the white space at its end, which is of it unless a tag follows."""
        held, self._held = self._held, ""
        return held
