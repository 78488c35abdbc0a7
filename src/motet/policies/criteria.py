"""Conditions that end a group early, on its finished choices.

    Finished(k)     k choices have finished
    Agree(k)        k finished choices have the same value
    Posterior(p)    the leading value is the most likely one with probability p   Adaptive-Consistency, arXiv 2305.11860
    Window(w)       all w choices of one window have the same value               ESC, arXiv 2401.10480
    AnyOf(...)      one of several conditions is met

`extract` finds the value of an answer. A choice without a value counts only for `Finished`.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from typing import ClassVar, NamedTuple, TypeAlias


class Majority(NamedTuple):
    """A value, and the number of choices with this value."""

    value: str
    votes: int


@dataclass
class Answers:
    """The finished choices of a group of n. Counts are kept up to date, since conditions are evaluated often."""

    n: int
    values: dict[int, str | None] = field(init=False, default_factory=dict)
    """Value of each finished choice, by index, in the order in which choices finished; None for no value."""
    lost: set[int] = field(init=False, default_factory=set)
    """Choices that will never finish."""
    counts: dict[str, int] = field(init=False, default_factory=dict)
    """Number of choices with each value."""
    leader: Majority | None = field(init=False, default=None)
    """The most frequent value; of equally frequent values, the first that reached this number. None without a value."""
    _second: int = field(init=False, default=0)
    """Number of choices with the second most frequent value."""

    def finish(self, index: int, value: str | None) -> None:
        self._check_open(index)
        self.values[index] = value
        if value is None:
            return
        count = self.counts[value] = self.counts.get(value, 0) + 1
        leader = self.leader
        if leader is None or leader.value == value:
            self.leader = Majority(value, count)
        elif count > leader.votes:
            self.leader, self._second = Majority(value, count), leader.votes
        else:
            self._second = max(self._second, count)

    def lose(self, index: int) -> None:
        self._check_open(index)
        self.lost.add(index)

    def leading(self) -> tuple[int, int]:
        """Returns the numbers of choices with the most frequent value and with the next one; 0 if there is none."""
        return (0 if self.leader is None else self.leader.votes), self._second

    def _check_open(self, index: int) -> None:
        if not 0 <= index < self.n:
            raise ValueError(f"choice {index} is not in a group of {self.n}")
        if index in self.values or index in self.lost:
            raise ValueError(f"choice {index} has ended already")


def posterior(first: int, second: int) -> Fraction:
    """Returns the probability that a value with `first` choices is more likely than a value with `second` choices.

    This is Adaptive-Consistency's Beta criterion. The share x of the first value among the two has the uniform prior,
    so the posterior Beta(first + 1, second + 1), and P(x > 1/2) is I_1/2(second + 1, first + 1). For integers this is
    the probability of more than `second` heads in first + second + 1 coin tosses."""
    tosses = first + second + 1
    exactly = at_most = 1  # number of outcomes with exactly, and with at most, the current number of heads
    for heads in range(1, second + 1):
        exactly = exactly * (tosses - heads + 1) // heads
        at_most += exactly
    return 1 - Fraction(at_most, 2**tosses)


@dataclass(frozen=True)
class Finished:
    """At least k choices have finished, with or without a value."""

    k: int
    name: ClassVar[str] = "finished"
    needs_values: ClassVar[bool] = False

    def met(self, answers: Answers) -> str | None:
        return self.name if len(answers.values) >= self.k else None


@dataclass(frozen=True)
class Agree:
    """At least k choices have the same value."""

    k: int
    name: ClassVar[str] = "agree"
    needs_values: ClassVar[bool] = True

    def met(self, answers: Answers) -> str | None:
        return self.name if answers.leading()[0] >= self.k else None


@dataclass(frozen=True)
class Posterior:
    """The most frequent value is more likely than the next one with at least this probability (`posterior`)."""

    p: float
    name: ClassVar[str] = "posterior"
    needs_values: ClassVar[bool] = True

    def met(self, answers: Answers) -> str | None:
        first, second = answers.leading()
        return self.name if first and posterior(first, second) >= self.p else None


@dataclass(frozen=True)
class Window:
    """All choices of one window have finished with the same value. Window k has the indices [k*w, (k+1)*w); remaining
    choices at the end are in no window. A window with a lost choice, or a choice without a value, never counts."""

    w: int
    name: ClassVar[str] = "window"
    needs_values: ClassVar[bool] = True

    def met(self, answers: Answers) -> str | None:
        get = answers.values.get
        for start in range(0, answers.n - self.w + 1, self.w):
            value = get(start)
            if value is not None and all(get(index) == value for index in range(start + 1, start + self.w)):
                return self.name
        return None


@dataclass(frozen=True)
class AnyOf:
    """One of several conditions is met."""

    conditions: tuple["Condition", ...]
    name: ClassVar[str] = "any_of"

    @property
    def needs_values(self) -> bool:
        return any(condition.needs_values for condition in self.conditions)

    def met(self, answers: Answers) -> str | None:
        return next((name for condition in self.conditions if (name := condition.met(answers))), None)


Condition: TypeAlias = Finished | Agree | Posterior | Window | AnyOf
"""`met` returns the name of the condition if it is met, else None. `AnyOf` returns the name of its first condition that
is met. `needs_values` is False for a condition that only counts choices."""
