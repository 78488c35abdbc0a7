"""The decisions of a group's policy: which choices end early, and which start. Pure: the same steps in the same order
give the same decisions.

    1. `add_logprobs`, `add_text`, `end`   for each new output of a step, in the order of the choices' indices
    2. `decide`                            once a step: checks the condition and the confidences, and starts choices

A choice waits, then runs, then has ended. `GroupPolicy.start` limits the number of choices that run at a time.
`PolicyDriver` calls this class for the groups of both kinds, of tokens and of texts.
"""

from collections import Counter, deque
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
    """The choices that the response contains if it is not streamed."""

    ALL = "all"
    """All choices that have started. Choices that were ended early have the finish reason `abort`."""
    FINISHED = "finished"
    """Only choices that were not ended early."""


class Refill(StrEnum):
    """The rule for starting waiting choices, if `start` limits the number of running choices."""

    EACH = "each"
    """One choice starts whenever another ends."""
    ALL = "all"
    """The next choices start together when all running choices have ended."""


@dataclass(frozen=True, kw_only=True)
class GroupPolicy:
    """The policy of a request. Each of its prompts is a group of its own."""

    stop_when: Condition | None = None
    """Condition that ends the group when it is met."""
    extract: Extract | None = None
    """Rule that finds the value of an answer in its text."""
    start: int | None = None
    """Maximum number of choices that run at a time; None if all choices start at once."""
    refill: Refill = Refill.EACH
    confidence: ConfidenceRule | None = None
    """Rule that ends choices of low confidence."""
    keep: Keep = Keep.ALL
    vote: bool = False
    """True if the report contains the values and the majority."""
    deterministic: bool = False
    """True if decisions depend on numbers of tokens only, not on when tokens arrive."""

    @property
    def reads_answers(self) -> bool:
        """True if decisions or the report depend on the texts of the answers."""
        return self.vote or (self.stop_when is not None and self.stop_when.needs_values)

    def num_first(self, n: int) -> int:
        """Returns the number of choices, of n, that start at once."""
        return n if self.start is None else self.start


class VoteReport(msgspec.Struct, frozen=True):
    """The values of the finished choices, and the most frequent value."""

    majority: str | None
    """The value that reached `count` first; None if no choice has a value."""
    count: int
    values: dict[int, str | None]
    """Value of each finished choice, by index; None for a choice without a value."""


class ConfidenceReport(msgspec.Struct, frozen=True):
    threshold: float | None
    """Threshold of the group; None if it was not known before the end."""
    lowest: dict[int, float | None]
    """Lowest confidence of each started choice, by index; None for a choice with fewer tokens than a window."""


class GroupReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a policy, as the response shows it."""

    id: str
    n: int
    """Maximum number of choices: the `n` of the request."""
    started: int = msgspec.field(name="begun")
    finished: int
    aborted: int
    """Number of choices that were ended early."""
    stopped_by: str | None
    """Name of the condition that ended the group; None if no condition did."""
    vote: VoteReport | None = None
    confidence: ConfidenceReport | None = None


class SteeringDecision(NamedTuple):
    """The decision after a step."""

    abort: tuple[int, ...] = ()
    """Running choices that end now."""
    start: tuple[int, ...] = ()
    """Waiting choices that start now."""
    drop: tuple[int, ...] = ()
    """Waiting choices that will never start."""


NO_CHANGE = SteeringDecision()


class AnswerValues:
    """The texts of answers until they are complete, and then their values until they are taken."""

    def __init__(self, extract: Extract | None) -> None:
        """`extract`: None if values are not needed."""
        self._extract = extract
        self._texts: dict[int, bytearray] = {}
        """Text of each answer so far, in UTF-8: a string for each token would take ten times as much memory."""
        self._values: dict[int, str | None] = {}

    def add_text(self, index: int, text: str) -> None:
        if self._extract is not None:
            if (texts := self._texts.get(index)) is None:
                texts = self._texts[index] = bytearray()
            texts += text.encode(errors="surrogatepass")

    def find(self, index: int) -> None:
        """Finds the value of a complete answer. A client's pattern can take milliseconds."""
        texts = self._texts.pop(index, None)
        text = "" if texts is None else texts.decode(errors="surrogatepass")
        self._values[index] = None if self._extract is None else self._extract.value(text)

    def take(self, index: int) -> str | None:
        """Returns and removes the value of a complete answer."""
        if index not in self._values:
            self.find(index)
        return self._values.pop(index)

    def discard(self, index: int) -> None:
        self._texts.pop(index, None)
        self._values.pop(index, None)


class Steering:
    """The state of one group under a policy."""

    def __init__(self, policy: GroupPolicy, indices: Sequence[int]) -> None:
        """`indices`: indices of the choices, in the order in which they start."""
        self._policy = policy
        first = policy.num_first(len(indices))
        self._started = list(indices[:first])
        self._waiting = deque(indices[first:])
        self._running = set(self._started)
        self._answers = Answers(len(indices))
        self._values = AnswerValues(policy.extract if policy.reads_answers else None)
        self._confidences = None if policy.confidence is None else Confidences(policy.confidence)
        self._num_scored = Counter[int]()
        """Number of tokens of each choice whose log-probabilities have been added."""
        self._aborted: set[int] = set()
        self._changed = False
        """True if a choice has ended since the last decision."""
        self._stopped_by: str | None = None
        self._stopped_by_operator = False

    @property
    def waiting(self) -> frozenset[int]:
        """Choices that have not started yet."""
        return frozenset(self._waiting)

    def add_logprobs(self, index: int, logprobs: Sequence[TokenLogprob], *, num_tokens: int) -> None:
        """Adds the log-probabilities of a choice's next tokens. `num_tokens`: new length of the choice; tokens after a
        stop string are not counted."""
        if self._confidences is not None:
            self._confidences.add(index, logprobs[: num_tokens - self._num_scored[index]])
            self._num_scored[index] = num_tokens

    def add_text(self, index: int, text: str) -> None:
        """Adds the next text of an answer, without reasoning and tool calls if they are separated."""
        self._values.add_text(index, text)

    def find_value(self, index: int) -> None:
        """Finds the value of a complete answer, which can take milliseconds. Otherwise `end` finds it."""
        self._values.find(index)

    def end(self, index: int, reason: FinishReason | None) -> None:
        """Records the end of a choice. `reason`: None if the client has ended the choice; `ABORT` if an operator has
        ended all running choices: then no other choice starts."""
        self._running.discard(index)
        self._changed = True
        if reason is None or reason is FinishReason.ABORT:
            self._end_early(index)
            self._stopped_by_operator = self._stopped_by_operator or reason is not None
            return
        self._answers.finish(index, self._values.take(index))
        if self._confidences is not None:
            self._confidences.ended(index)

    def decide(self) -> SteeringDecision:
        """Returns the decision after a step. Must be called once a step."""
        condition, lost = self._policy.stop_when, tuple[int, ...]()
        if self._changed and condition is not None and (met := condition.met(self._answers)) is not None:
            self._stopped_by = met
            return self._stop()
        if self._stopped_by_operator:
            return SteeringDecision(drop=self.withdraw_all())
        if self._confidences is not None:
            lost = self._confidences.lost()
            for index in lost:
                self._end_early(index)
        if not (self._changed or lost):
            return NO_CHANGE
        self._changed = False
        return SteeringDecision(lost, self._refill())

    def withdraw_all(self) -> tuple[int, ...]:
        """Removes all waiting choices, and returns them."""
        dropped = tuple(self._waiting)
        for index in dropped:
            self.withdraw(index)
        return dropped

    def withdraw(self, index: int) -> bool:
        """Removes a waiting choice. Returns False if the choice is not waiting."""
        if index not in self._waiting:
            return False
        self._waiting.remove(index)
        self._lose(index)
        return True

    def report(self, id: str) -> GroupReport:
        finished, vote, confidence = self._answers.values, None, None
        if self._policy.vote:
            value, count = self._answers.leader or (None, 0)
            vote = VoteReport(value, count, {index: finished[index] for index in sorted(finished)})
        if self._confidences is not None:
            lowest = {index: self._confidences.lowest(index) for index in sorted(self._started)}
            confidence = ConfidenceReport(self._confidences.threshold, lowest)
        return GroupReport(
            id=id,
            n=self._answers.n,
            started=len(self._started),
            finished=len(finished),
            aborted=len(self._aborted),
            stopped_by=self._stopped_by,
            vote=vote,
            confidence=confidence,
        )

    def _stop(self) -> SteeringDecision:
        """Ends all running choices, and drops all waiting choices."""
        self._changed = False
        ended = tuple(sorted(self._running))
        for index in ended:
            self._end_early(index)
        return SteeringDecision(ended, drop=self.withdraw_all())

    def _end_early(self, index: int) -> None:
        self._running.discard(index)
        self._values.discard(index)
        self._aborted.add(index)
        self._lose(index)

    def _lose(self, index: int) -> None:
        """Records that a choice will never finish."""
        self._answers.lose(index)
        if self._confidences is not None:
            self._confidences.ended(index)

    def _refill(self) -> tuple[int, ...]:
        """Starts as many waiting choices as the policy allows, and returns them."""
        if self._policy.refill is Refill.ALL and self._running:
            return ()
        free = self._policy.num_first(self._answers.n) - len(self._running)
        started = tuple(self._waiting.popleft() for _ in range(min(free, len(self._waiting))))
        self._started += started
        self._running.update(started)
        return started
