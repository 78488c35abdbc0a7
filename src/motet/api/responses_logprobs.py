"""Which tokens the text of a message is made of.

A choice tells log-probabilities of all its tokens, tags and thoughts and calls among them; those of a message are the
ones whose text is in it. Parts follow each other in the text of the choice, with what belongs to none of them between.
"""

from collections import deque

from motet.text.choice import ChoiceEvent
from motet.types import TokenLogprob


class PartLogprobs:
    """Feed it an event of the choice, then take the parts that the event shows, in their order.

    A part may begin in text that was held back, and ends where that ends or later; so no older text is taken for it.
    What of a step is neither content nor thoughts may be left out; if the same text is in it, a step of several tokens
    is read wrong there.
    """

    def __init__(self) -> None:
        self._text = ""
        """Of the choice, from `_begins` on."""
        self._begins = 0
        self._shown = 0
        """How long the text was before the last event."""
        self._tokens: deque[tuple[int, TokenLogprob]] = deque()
        """(where the token's text begins, token): those that no part has taken."""

    def feed(self, event: ChoiceEvent) -> None:
        self._shown = self._begins + len(self._text)
        self._text += event.text
        self._tokens.extend(zip(event.offsets or (), event.logprobs or (), strict=True))

    def take(self, part: str) -> list[TokenLogprob]:
        """The tokens of the next part. One that ends in it belongs to it, if it was not the last of the part before."""
        found = self._text.find(part, max(self._shown - len(part) - self._begins, 0))
        if not part or found < 0:
            return []
        start, end = self._begins + found, self._begins + found + len(part)
        taken = []
        while self._tokens and self._tokens[0][0] < end:
            begins, token = self._tokens.popleft()
            until = self._tokens[0][0] if self._tokens else end
            if begins >= start or until > start:
                taken.append(token)
        self._text, self._begins = self._text[found + len(part) :], end
        return taken
