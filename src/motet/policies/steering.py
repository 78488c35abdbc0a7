"""Steers one group: takes in what its choices write, step by step, and says after each step which of them end and how
many more begin. Pure, so the same steps in the same order give the same decisions.

    1. `scored`, `wrote`, `ended`   all that the step brought, in the order of the choices' indices
    2. `decide`                     once a step: is enough known, whose confidence is too low, how many begin

A choice is waiting, then writing, then over. `start` says how many write at a time.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import msgspec

from motet.policies.confidence import ConfidenceRule, Confidences
from motet.policies.criteria import Answers, Condition
from motet.policies.extract import Extract
from motet.types import FinishReason, TokenLogprob


class Keep(StrEnum):
    """The choices that come back in a whole answer."""

    ALL = "all"
    """All that have begun; those that were ended early have the finish reason `abort`."""
    FINISHED = "finished"
    """Only those that were not ended early."""


class Refill(StrEnum):
    """When choices that wait begin, if `start` holds them back."""

    EACH = "each"
    """One as soon as another has ended."""
    ALL = "all"
    """The next ones together, when all that have begun have ended."""


@dataclass(frozen=True, kw_only=True)
class GroupPolicy:
    """How a request wants its groups steered; each of its prompts is a group."""

    stop_when: Condition | None = None
    """The group ends when this is met."""
    extract: Extract | None = None
    """How the value of an answer is found in its text."""
    start: int | None = None
    """Most choices that write at a time; None: all."""
    refill: Refill = Refill.EACH
    confidence: ConfidenceRule | None = None
    """Ends choices of low confidence."""
    keep: Keep = Keep.ALL
    vote: bool = False
    """True if the report tells the values and the majority."""
    deterministic: bool = False
    """True: what happens is ordered by numbers of tokens and not by arrival."""

    @property
    def needs_values(self) -> bool:
        """True if the texts of the answers matter."""
        return self.vote or (self.stop_when is not None and self.stop_when.needs_values)

    def num_first(self, n: int) -> int:
        """Returns how many of n choices begin at once."""
        return n if self.start is None else self.start


class VoteReport(msgspec.Struct, frozen=True):
    """The values of the answers that have finished, and the one that most of them have."""

    majority: str | None
    """None if no answer has a value. Of several with the same count, the one that a choice had first."""
    count: int
    values: dict[int, str | None]
    """Index of the choice -> its value; None: it has none."""


class ConfidenceReport(msgspec.Struct, frozen=True):
    threshold: float | None
    """None if it never was known."""
    lowest: dict[int, float | None]
    """Index of the choice -> its lowest confidence; None: it has written less than a window."""


class GroupReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What has become of a steered group."""

    id: str
    n: int
    """Choices that it might have had."""
    begun: int
    finished: int
    aborted: int
    """Choices that were ended early."""
    stopped_by: str | None
    """The condition that ended the group; None: all choices that were wanted ended by themselves."""
    vote: VoteReport | None = None
    confidence: ConfidenceReport | None = None


class SteeringDecision(NamedTuple):
    """What is to happen after a step."""

    abort: tuple[int, ...] = ()
    """Choices that end here."""
    begin: tuple[int, ...] = ()
    """Choices that begin."""
    drop: tuple[int, ...] = ()
    """Choices that have not begun, and never will."""


NOTHING = SteeringDecision()


class Steering:
    """The state of one group under a policy."""

    def __init__(self, policy: GroupPolicy, indices: Sequence[int]) -> None:
        """`indices`: of the choices, in the order in which they begin."""
        start = policy.num_first(len(indices))
        self._policy = policy
        self._begun = list(indices[:start])
        self._waiting = deque(indices[start:])
        self._writing = set(self._begun)
        self._start = start
        self._texts: dict[int, list[str]] = {}
        """Pieces of the answers that are being written, if their values are wanted."""
        self.reads_answers = policy.needs_values
        """True if the texts of answers matter; else nobody need bring them."""
        self._answers = Answers(len(indices))
        self._values: dict[int, str | None] = {}
        """The values of answers that are whole, until their ends are taken in."""
        self._confidences = None if policy.confidence is None else Confidences(policy.confidence)
        self._scored: dict[int, int] = {}
        """Number of tokens of each choice whose log-probabilities have come."""
        self._aborted: set[int] = set()
        self._changed = False
        """True if a choice has ended since the last decision."""
        self._stopped_by: str | None = None
        self._cut = False
        """True once an operator has ended what was being written."""

    @property
    def waiting(self) -> frozenset[int]:
        """The choices that have not begun, and may."""
        return frozenset(self._waiting)

    def scored(self, index: int, logprobs: Sequence[TokenLogprob], *, num_tokens: int) -> None:
        """Takes in the log-probabilities of a choice's next tokens. `num_tokens`: how many it has then: those behind
        a stop string are none of it."""
        if self._confidences is not None:
            scored = self._scored.get(index, 0)
            self._confidences.wrote(index, logprobs[: num_tokens - scored])
            self._scored[index] = num_tokens

    def wrote(self, index: int, text: str) -> None:
        """Takes in the next text of an answer: without thoughts and calls, if they are told apart."""
        if self.reads_answers:
            self._texts.setdefault(index, []).append(text)

    def find_value(self, index: int) -> None:
        """Finds the value of an answer that is whole, which may take milliseconds; `ended` does it otherwise."""
        text, extract = "".join(self._texts.pop(index, ())), self._policy.extract
        self._values[index] = extract.value(text) if extract is not None and self.reads_answers else None

    def ended(self, index: int, reason: FinishReason | None) -> None:
        """Takes in the end of a choice. `reason`: None if the client has ended it; `ABORT` if an operator has ended all
        that write, and then no more begin."""
        self._writing.discard(index)
        self._changed = True
        if reason is None or reason is FinishReason.ABORT:
            self._end_early(index)
            self._cut = self._cut or reason is not None
            return
        if index not in self._values:
            self.find_value(index)
        self._answers.finish(index, self._values.pop(index))
        if self._confidences is not None:
            self._confidences.ended(index)

    def decide(self) -> SteeringDecision:
        """Returns what follows from all that was taken in; called once a step."""
        condition, lost = self._policy.stop_when, tuple[int, ...]()
        if self._changed and condition is not None and (met := condition.met(self._answers)) is not None:
            self._stopped_by = met
            return self._stop()
        if self._cut:
            return SteeringDecision(drop=self.withdraw_all())
        if self._confidences is not None:
            lost = self._confidences.lost()
            for index in lost:
                self._end_early(index)
        if not (self._changed or lost):
            return NOTHING
        self._changed = False
        return SteeringDecision(lost, self._refill())

    def withdraw_all(self) -> tuple[int, ...]:
        """Takes out all choices that wait; returns them."""
        dropped = tuple(self._waiting)
        for index in dropped:
            self.withdraw(index)
        return dropped

    def withdraw(self, index: int) -> bool:
        """Takes out a choice that waits. Returns False if it does not wait."""
        if index not in self._waiting:
            return False
        self._waiting.remove(index)
        self._lose(index)
        return True

    def report(self, id: str) -> GroupReport:
        """`id`: the group's name."""
        finished, vote, confidence = self._answers.values, None, None
        if self._policy.vote:
            value, count = self._answers.majority() or (None, 0)
            vote = VoteReport(value, count, {index: finished[index] for index in sorted(finished)})
        if self._confidences is not None:
            lowest = {index: self._confidences.lowest(index) for index in sorted(self._begun)}
            confidence = ConfidenceReport(self._confidences.threshold, lowest)
        return GroupReport(
            id=id,
            n=self._answers.n,
            begun=len(self._begun),
            finished=len(finished),
            aborted=len(self._aborted),
            stopped_by=self._stopped_by,
            vote=vote,
            confidence=confidence,
        )

    def _stop(self) -> SteeringDecision:
        """Ends all that write, and lets nothing begin."""
        self._changed = False
        ended = tuple(sorted(self._writing))
        for index in ended:
            self._end_early(index)
        return SteeringDecision(ended, drop=self.withdraw_all())

    def _end_early(self, index: int) -> None:
        self._writing.discard(index)
        self._texts.pop(index, None)
        self._values.pop(index, None)
        self._aborted.add(index)
        self._lose(index)

    def _lose(self, index: int) -> None:
        """Notes that a choice will never finish."""
        self._answers.lose(index)
        if self._confidences is not None:
            self._confidences.ended(index)

    def _refill(self) -> tuple[int, ...]:
        """Lets choices begin that wait; returns them."""
        if self._policy.refill is Refill.ALL and self._writing:
            return ()
        count = min(self._start - len(self._writing), len(self._waiting))
        begun = tuple(self._waiting.popleft() for _ in range(count))
        self._begun += begun
        self._writing.update(begun)
        return begun
