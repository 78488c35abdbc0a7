"""Keeps the tokens of a choice until their text is shown, so that ids, log-probabilities and text go in step."""

from collections import deque

import msgspec

from motet.types import TokenLogprob


class PacedToken(msgspec.Struct, frozen=True):
    """A token whose text is [start, end) of the answer; tokens that make up a character have the same range."""

    token_id: int
    logprob: TokenLogprob | None
    start: int
    end: int

    def within(self, length: int) -> bool:
        """Whether an answer of `length` characters shows something of it; one without text stands where it came."""
        return self.start < length or self.end <= length


class TokenPace:
    """Tokens come in by `add`, text by `advance`; `take` gives the tokens whose text is shown."""

    def __init__(self) -> None:
        self.num_chars = 0
        """Of the answer so far, what is held back included."""
        self.waiting: list[tuple[int, TokenLogprob | None]] = []
        """No text came since these."""
        self._held: deque[PacedToken] = deque()

    def add(self, token_id: int, logprob: TokenLogprob | None) -> None:
        self.waiting.append((token_id, logprob))

    def advance(self, num_chars: int) -> None:
        """The next text has come; it belongs to all tokens that wait."""
        start, self.num_chars = self.num_chars, self.num_chars + num_chars
        for token_id, logprob in self.waiting:
            self._held.append(PacedToken(token_id, logprob, start, self.num_chars))
        self.waiting.clear()

    def take(self, shown: int) -> list[PacedToken]:
        """The tokens whose text is within the first `shown` characters and that were not taken before."""
        if shown == self.num_chars:
            taken = list(self._held)
            self._held.clear()
            return taken
        taken = []
        while self._held and self._held[0].end <= shown:
            taken.append(self._held.popleft())
        return taken

    def take_rest(self) -> list[PacedToken]:
        """The answer is over: all that is left."""
        self.advance(0)
        return self.take(self.num_chars)
