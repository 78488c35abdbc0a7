"""Finds stop strings, and tags, in text that arrives in pieces, and holds back text that may still become one.

A choice ends at the first stop string to be complete; of several complete at the same character, the longest. So it
makes no difference how the text was cut into pieces, and no choice writes on to see if a longer one comes.

The search is the automaton of Aho and Corasick ("Efficient string matching", CACM 1975): one state a prefix of a
stop string, so the state after a character says both what is complete and how much must be held back.

    stop strings "abc", "bd":    text  x a b d ...
    held back after each character:    0 1 2 -> "bd" is complete, "xa" is the answer
"""

from collections.abc import Sequence

import msgspec


class StopStrings:
    """The compiled stop strings of one request; shared by its choices, never changes."""

    def __init__(self, strings: Sequence[str]) -> None:
        """`strings`: if there are none, nothing is found."""
        if not all(strings):
            raise ValueError(f"stop strings must not be empty: {strings!r}")
        self.longest = max(map(len, strings), default=0)
        self.moves: list[dict[str, int]] = [{}]
        """State -> character -> state one character deeper. State 0: nothing matched."""
        self.fallback = [0]
        """State -> the longest proper suffix of its prefix that is a prefix too."""
        self.complete: list[str | None] = [None]
        """State -> the longest stop string that ends there."""
        self.held = [0]
        """State -> number of characters that may still become a stop string."""
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
        """Breadth first: the fallback of a state is shallower than the state, so it is known when it is needed."""
        queue = list(self.moves[0].values())
        for state in queue:
            for char, deeper in self.moves[state].items():
                self.fallback[deeper] = self.step(self.fallback[state], char)
                queue.append(deeper)
            if self.complete[state] is None:
                self.complete[state] = self.complete[self.fallback[state]]
            if not self.moves[state]:  # no stop string goes on from here, but one may from a suffix
                self.held[state] = self.held[self.fallback[state]]

    def step(self, state: int, char: str) -> int:
        while state and char not in self.moves[state]:
            state = self.fallback[state]
        return self.moves[state].get(char, 0)


class ReleasedText(msgspec.Struct, frozen=True, gc=False):
    """The text that may be shown, up to the stop string if one was found."""

    text: str
    stop: str | None = None
    rest: str = ""
    """With `stop`: the text after it in the piece."""


class StopMatcher:
    """The search through the text of one choice."""

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._state = 0
        self._held = ""

    @property
    def num_held(self) -> int:
        return len(self._held)

    def passes(self, piece: str) -> bool:
        """Returns True if `feed` would release just this piece: nothing is held, and no stop string begins in it."""
        return not self._state and self._strings.firsts.isdisjoint(piece)

    def feed(self, piece: str, *, may_stop: bool = True) -> ReleasedText:
        """Takes the next piece. Stop strings that are complete inside a piece that may not stop are plain text.

        After a stop string was found, the search may begin again with the rest of the piece.
        """
        if self.passes(piece):
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
        """Returns what was held back, which is plain text now that the answer is over."""
        held, self._held, self._state = self._held, "", 0
        return held
