"""Draft tokens: what a choice may write next, guessed from what was written before, and checked in the same step.

    written  ... a b c | drafts  d e f        rows of the step:  c d e f
                                              drawn:             d e x .      kept: d e x

A draft is one more row of the step. The token after each row is drawn as ever, by the choice's seed and its position,
and drafts are kept for as long as they equal what was drawn. So nothing but the number of steps depends on them.

A row costs time, all the more of a step the more choices are in it (`bench.guesses`). So drafts are made only in steps
of few choices, and only as many as are likely enough to be right: how often those of a group were right is counted, for
guesses from two and from four tokens apart.

Guesses come from the prompt and the answers of one group (prompt lookup: what followed the last tokens when they stood
there last), and where a grammar leaves one token after a draft, from the grammar.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from motet.engines.native.step.sequence import Group
from motet.engines.native.step.sequence import Sequence as Choice

SPANS = (4, 2)
"""Numbers of last tokens that are looked for, the surer one first."""
FIRST_CHANCES = (0.6, 0.3)
"""How likely a draft is right before any was checked, for each of `SPANS`."""
WEIGHT = 0.08
"""Of the newest draft, in how often drafts were right."""
PATIENCE = 0.01
"""How fast a group that makes no drafts any more comes back to try."""
MOST_CHOICES = 8
"""Steps of more choices make no drafts: a row then costs as much as the token that it may bring."""
ROW_COST = 0.04
"""Of a step of one choice, for each row more."""
MOST_INDEXED = 2**15
"""Tokens of a prompt, the last ones, that are looked at."""


class NgramIndex:
    """Finds where the last tokens of a stream stood before, in any of its streams: a prompt and its answers."""

    def __init__(self, streams: Sequence[Sequence[int]]) -> None:
        """The streams may grow."""
        self._streams = streams
        self._read = [0] * len(streams)
        self._places: list[dict[tuple[int, ...], tuple[int, int]]] = [{} for _ in SPANS]

    def catch_up(self) -> None:
        """Reads what was written since the last call."""
        for number, tokens in enumerate(self._streams):
            begin, self._read[number] = self._read[number], len(tokens)
            for span, places in zip(SPANS, self._places, strict=True):
                for at in range(max(begin, span), len(tokens)):  # what stands there follows the tokens before it
                    places[tuple(tokens[at - span : at])] = number, at

    def after(self, last: Sequence[int]) -> tuple[int, int] | None:
        """Returns which of `SPANS` last tokens were found, and the token that followed them when they stood there
        last."""
        for level, span in enumerate(SPANS):
            if (place := self._places[level].get(tuple(last[-span:]))) is not None:
                stream, at = place
                return level, self._streams[stream][at]
        return None


@dataclass(eq=False)
class GroupDrafts:
    """What the drafts of one group come from, and how often they were right."""

    index: NgramIndex
    chances: list[float] = field(default_factory=lambda: [*FIRST_CHANCES])
    """How likely a draft is right, for each of `SPANS`."""

    @classmethod
    def of(cls, group: Group) -> "GroupDrafts":
        return cls(NgramIndex([group.prompt[-MOST_INDEXED:], *(choice.written for choice in group.sequences)]))

    def learn(self, level: int, right: bool) -> None:
        self.chances[level] += WEIGHT * (right - self.chances[level])

    def pass_by(self, level: int) -> None:
        """Notes a draft that was not made, because it was too unlikely."""
        self.chances[level] += PATIENCE * (FIRST_CHANCES[level] - self.chances[level])


@dataclass(eq=False)
class Drafter:
    """Makes the drafts of a step, and learns from them."""

    most: int
    """Most drafts of a choice in a step; 0: none are made."""
    max_model_len: int

    def __post_init__(self) -> None:
        self._groups: dict[Group, GroupDrafts] = {}
        """Of the groups that were in the last step, if that had few choices."""
        self._levels: dict[Choice, list[int | None]] = {}
        """Where the last step's drafts come from: a place in `SPANS`, or None for a grammar."""

    def begin(self, choices: Sequence[Choice]) -> bool:
        """Begins a step in which these choices are written. Returns False if it should have no drafts."""
        self._levels.clear()
        if not self.most or len(choices) > MOST_CHOICES:
            self._groups.clear()
            return False
        groups = {choice.group for choice in choices}
        self._groups = {group: self._groups.get(group) or GroupDrafts.of(group) for group in groups}
        for drafts in self._groups.values():
            drafts.index.catch_up()
        return True

    def drafts(self, choice: Choice, *, choices: int) -> list[int]:
        """Returns tokens that may follow what a choice has written, in a step of so many choices."""
        group, room = choice.group, self._room(choice)
        found, least = self._groups[group], ROW_COST * choices
        known = [*group.prompt[-SPANS[0] :], *choice.written[-SPANS[0] :]]
        levels = self._levels[choice] = []
        drafts: list[int] = []
        state = choice.sampling
        chance = 1.0
        while len(drafts) < room:
            sure = state.only_ones()[: room - len(drafts)]
            level = None
            if not sure:
                if (guess := found.index.after(known)) is None:
                    break
                level, token_id = guess
                chance *= found.chances[level]
                if chance < least:
                    if not drafts:
                        found.pass_by(level)
                    break
                sure = [token_id]
            if (then := state.ahead(sure)) is None:
                break
            state = then
            drafts += sure
            known += sure
            levels += [level] * len(sure)
        return drafts

    def learn(self, right: Iterable[tuple[Choice, int]]) -> None:
        """Takes in how many of the last step's drafts of each choice were right, from the first on."""
        for choice, count in right if self._levels else ():
            for place, level in enumerate(self._levels.get(choice, [])[: count + 1]):
                if level is not None:
                    self._groups[choice.group].learn(level, place < count)

    def _room(self, choice: Choice) -> int:
        """Returns the most drafts that a choice may have: the token after the last one must fit too."""
        written = len(choice.written)
        limits = self.most, choice.group.request.sampling.max_tokens - written - 1
        return min(*limits, self.max_model_len - len(choice.group.prompt) - written - 1)
