"""Finds stop strings, and tags, in text that arrives in pieces, and holds text that can still become a stop string.

A choice ends at the first stop string that is complete. If several are complete at the same character, the longest
counts. The result does not depend on the pieces, and no choice generates more tokens to find a longer stop string.

The search is the automaton of Aho and Corasick ("Efficient string matching", CACM 1975). It has one state for each
prefix of a stop string, so the state after a character determines which stop string is complete and how many characters
must be held.

    stop strings "abc", "bd":             text  x a b d ...
    number of characters held after each one:   0 1 2 -> "bd" is complete, "xa" is the answer
"""

from collections.abc import Sequence

import msgspec


class StopStrings:
    """The compiled stop strings of one request. Immutable; all choices share it."""

    def __init__(self, strings: Sequence[str]) -> None:
        """Without any strings, no stop string is ever found."""
        if not all(strings):
            raise ValueError(f"stop strings must not be empty: {strings!r}")
        self.longest = max(map(len, strings), default=0)
        self.moves: list[dict[str, int]] = [{}]
        """For each state: next state by character. State 0 is the empty prefix."""
        self.fallback = [0]
        """For each state: the state of the longest proper suffix of its prefix that is also a prefix."""
        self.complete: list[str | None] = [None]
        """For each state: the longest stop string that is complete in it."""
        self.held = [0]
        """For each state: number of characters that can still become a stop string."""
        self.firsts = frozenset(string[0] for string in strings)
        for string in strings:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self.moves[state]:
                self.moves[state][char] = len(self.moves)
                self.moves.append({})
                self.fallback.append(0)
                self.complete.append(None)
                self.held.append(self.held[state] + 1)
            state = self.moves[state][char]
        self.complete[state] = string

    def _link(self) -> None:
        """Sets the fallbacks, breadth first: the fallback of a state is shorter, so it is set before it is needed."""
        queue = list(self.moves[0].values())
        for state in queue:
            for char, deeper in self.moves[state].items():
                self.fallback[deeper] = self.step(self.fallback[state], char)
                queue.append(deeper)
            if self.complete[state] is None:
                self.complete[state] = self.complete[self.fallback[state]]
            if not self.moves[state]:  # no stop string continues from this state, but one can continue from a suffix
                self.held[state] = self.held[self.fallback[state]]

    def step(self, state: int, char: str) -> int:
        while state and char not in self.moves[state]:
            state = self.fallback[state]
        return self.moves[state].get(char, 0)


class ReleasedText(msgspec.Struct, frozen=True, gc=False):
    """The text that can be sent to the client, and the stop string after it, if one was found."""

    text: str
    stop: str | None = None
    rest: str = ""
    """Text of the piece after the stop string."""


class StopMatcher:
    """Searches the text of one choice."""

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._state = 0
        self._held = ""

    @property
    def num_held(self) -> int:
        return len(self._held)

    def passes_unchanged(self, piece: str) -> bool:
        """Returns True if `feed` would release exactly this piece: nothing is held, and no stop string starts in it."""
        return not self._state and self._strings.firsts.isdisjoint(piece)

    def feed(self, piece: str, *, may_stop: bool = True) -> ReleasedText:
        """Takes the next piece. With `may_stop` False, a stop string that becomes complete in the piece is plain text.
        After a stop string was found, the search can continue with the rest of the piece."""
        if self.passes_unchanged(piece):
            return ReleasedText(piece)
        strings, state = self._strings, self._state
        text = self._held + piece
        for end, char in enumerate(piece, len(self._held) + 1):
            state = strings.step(state, char)
            stop = strings.complete[state]
            if stop is not None and may_stop:
                self._held, self._state = "", 0
                return ReleasedText(text[: end - len(stop)], stop, text[end:])
        cut = len(text) - strings.held[state]
        self._state, self._held = state, text[cut:]
        return ReleasedText(text[:cut])

    def close(self) -> str:
        """Returns the held text, which is plain text because the answer is over."""
        held, self._held, self._state = self._held, "", 0
        return held
