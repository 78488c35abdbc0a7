"""Draft tokens: what a choice may write next, guessed from what was written before, and checked in the same step.

    written  ... a b c | drafts  d e f        rows of the step:  c d e f
                                              drawn:             d e x .      kept: d e x

A draft is one more row of the step. The token after each row is drawn as ever, by the choice's seed and its position,
and drafts are kept for as long as they equal what was drawn. So nothing but the number of steps depends on them.

A row costs time, all the more of a step the more choices are in it (`docs/log.md`). So drafts are made only in steps
of few choices, and only as many as are likely enough to be right: how often those of a group were right is counted, for
guesses from four, from two tokens and from one apart.

Guesses come from the prompt and the answers of one group (prompt lookup: what followed the last tokens when they stood
there last), where a grammar leaves one token after a draft, from the grammar, and if that is wanted, from earlier
answers to the same prompt.
"""

from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from motet.engines.native.step.sequence import ChoiceSequence, Group
from motet.engines.native.step.step_plan import Draft, TailChunk

SPANS = (4, 2, 1)
"""Numbers of last tokens that are looked for, the surer one first."""
FIRST_CHANCES = (0.6, 0.4, 0.2)
"""How likely a draft is right before any was checked, for each of `SPANS`."""
WEIGHT = 0.08
"""How much the newest draft counts in how often drafts were right."""
PATIENCE = 0.01
"""How fast a group that makes no drafts any more comes back to try."""
MOST_CHOICES = 4
"""Steps of more choices make no drafts: a row then costs as much as the token that it may bring."""
ROW_COST = 0.05
"""What each row more costs, in terms of a step of one choice."""
MOST_INDEXED = 2**15
"""Tokens of a prompt, the last ones, that are looked at."""
READ_A_STEP = 2**11
"""Tokens that are read in a step at most, about 3 ms: a long prompt is read step by step."""
MOST_EARLIER = 64
"""Earlier answers to a prompt that are looked at, the newest ones."""
_NOWHERE = (-1, 0)


class NgramIndex:
    """Finds where the last tokens of a stream stood before, in any of its streams: a prompt and its answers."""

    def __init__(self, streams: Sequence[Sequence[int]]) -> None:
        """The streams may grow; what stands in a later one counts more."""
        self._streams = streams
        self._read = [0] * len(streams)
        self._places: list[dict[tuple[int, ...], tuple[int, int]]] = [{} for _ in SPANS]

    def catch_up(self, most: int = READ_A_STEP) -> None:
        """Reads what was written since the last call, the later streams first, at most so many tokens."""
        for number in range(len(self._streams) - 1, -1, -1):
            tokens, begin = self._streams[number], self._read[number]
            end = min(len(tokens), begin + most)
            for span, places in zip(SPANS, self._places, strict=True):
                for at in range(max(begin, span), end):  # what stands there follows the tokens before it
                    last = tuple(tokens[at - span : at])
                    if places.get(last, _NOWHERE)[0] <= number:
                        places[last] = number, at
            self._read[number] = end
            most -= end - begin

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

    def learn(self, source: int, right: bool) -> None:
        self.chances[source] += WEIGHT * (right - self.chances[source])

    def pass_by(self, source: int) -> None:
        """Notes a draft that was not made, because it was too unlikely."""
        self.chances[source] += PATIENCE * (FIRST_CHANCES[source] - self.chances[source])


class History:
    """The last answers, by prompt, for when the same prompts are asked again."""

    def __init__(self, most_tokens: int) -> None:
        self._room = most_tokens
        """Tokens for which there is still room."""
        self._answers: defaultdict[bytes, deque[tuple[int, ...]]] = defaultdict(deque)
        self._order: deque[bytes] = deque()
        """The prompt of each answer, the oldest answer first."""

    def keep(self, choice: ChoiceSequence) -> None:
        """Keeps the answer of a choice that has ended; the oldest ones make room."""
        if not choice.output_tokens:
            return
        name = _name(choice.group)
        self._answers[name].append(tuple(choice.output_tokens))
        self._order.append(name)
        self._room -= len(choice.output_tokens)
        while self._room < 0:
            oldest = self._order.popleft()
            self._room += len(self._answers[oldest].popleft())
            if not self._answers[oldest]:
                del self._answers[oldest]

    def answers(self, group: Group) -> list[tuple[int, ...]]:
        """Returns the newest answers to a group's prompt, the oldest of them first."""
        return [*self._answers.get(_name(group), ())][-MOST_EARLIER:]


def _name(group: Group) -> bytes:
    """Returns a name for a prompt; groups with other salts have other ones."""
    return blake2b(array("q", group.prompt).tobytes() + group.request.cache_salt.encode(), digest_size=16).digest()


@dataclass(eq=False)
class Drafter:
    """Makes the drafts of a step, and learns from them."""

    most: int
    """Most drafts of a choice in a step; 0: none are made."""
    max_model_len: int
    history: History | None = None

    def begin(self, choices: Sequence[ChoiceSequence]) -> bool:
        """Begins a step in which these choices are written. Returns False if it should have no drafts."""
        if not self.most or len(choices) > MOST_CHOICES:
            return False
        groups = {choice.group for choice in choices}
        for group in groups:
            self._of(group).index.catch_up(READ_A_STEP // len(groups))
        return True

    def drafts(self, choice: ChoiceSequence, *, choices: int) -> list[Draft]:
        """Returns tokens that may follow what a choice has written, in a step of so many choices."""
        group, room = choice.group, self._room(choice)
        found, least = self._of(group), ROW_COST * choices
        known = [*group.prompt[-SPANS[0] :], *choice.output_tokens[-SPANS[0] :]]
        drafts: list[Draft] = []
        state, chance = choice.sampling, 1.0
        sure = state.only_ones()
        while len(drafts) < room and not (drafts and state.may_end_with(drafts[-1].token_id)):
            source = None
            if sure:
                token_id = sure.pop(0)
            elif (guess := found.index.after(known)) is not None:
                source, token_id = guess
                chance *= found.chances[source]
                if chance < least:
                    if not drafts:
                        found.pass_by(source)
                    break
            else:
                break
            if (then := state.ahead(token_id)) is None:
                break
            state = then
            drafts.append(Draft(token_id, state, source))
            known.append(token_id)
            sure = sure or state.only_ones()
        return drafts

    def learn(self, tails: Iterable[TailChunk], right: Mapping[ChoiceSequence, int]) -> None:
        """Takes in how many of each choice's drafts in a step were right, from the first on."""
        for chunk in tails:
            count = right[chunk.sequence]
            for place, draft in enumerate(chunk.drafts[: count + 1]):
                if draft.source is not None:
                    self._of(chunk.sequence.group).learn(draft.source, place < count)

    def _of(self, group: Group) -> GroupDrafts:
        """Returns what the drafts of a group come from, which lives as long as the group."""
        if group.drafts is None:
            earlier = self.history.answers(group) if self.history is not None else []
            written = [choice.output_tokens for choice in group.sequences]
            group.drafts = GroupDrafts(NgramIndex([group.prompt[-MOST_INDEXED:], *earlier, *written]))
        return group.drafts

    def _room(self, choice: ChoiceSequence) -> int:
        """Returns the most drafts that a choice may have: the token after the last one must fit too."""
        written = len(choice.output_tokens)
        limits = self.most, choice.group.request.sampling.max_tokens - written - 1
        return min(*limits, self.max_model_len - len(choice.group.prompt) - written - 1)
