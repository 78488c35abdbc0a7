"""What happened to one group, told step by step; pure, with time as an argument."""

from collections.abc import Sequence
from typing import Protocol

from motet.types import FinishReason


class Shown(Protocol):
    """What a step showed of one choice."""

    @property
    def index(self) -> int: ...

    @property
    def finish(self) -> FinishReason | None: ...


class GroupRecord:
    """Times in seconds of one clock. A choice is known from its first text on."""

    def __init__(self, *, num_choices: int, started_s: float) -> None:
        self.num_choices = num_choices
        self.started_s = started_s
        self.last_step_s: float | None = None
        self.first_seen_s: dict[int, float] = {}
        self.finished_s: dict[int, float] = {}
        self.finish_reasons: dict[int, FinishReason] = {}

    def step(self, choices: Sequence[Shown], now_s: float) -> float | None:
        """Notes what one step brought; the time since the step before, None at the first."""
        last_s, self.last_step_s = self.last_step_s, now_s
        if len(self.first_seen_s) < self.num_choices:
            for choice in choices:
                self.first_seen_s.setdefault(choice.index, now_s)
        for choice in choices:
            if choice.finish is not None:
                self.finished_s[choice.index] = now_s
                self.finish_reasons[choice.index] = choice.finish
        return None if last_s is None else now_s - last_s

    @property
    def all_finished(self) -> bool:
        return len(self.finished_s) == self.num_choices

    @property
    def first_token_s(self) -> float | None:
        """From the start to the first token of the first choice."""
        return min(self.first_seen_s.values()) - self.started_s if self.first_seen_s else None

    @property
    def last_choice_first_token_s(self) -> float | None:
        """From the start to the first token of the last choice, once every choice has one."""
        return max(self.first_seen_s.values()) - self.started_s if len(self.first_seen_s) == self.num_choices else None

    @property
    def finish_spread_s(self) -> float | None:
        """From the end of the first choice to the end of the last, once every choice has ended."""
        return max(self.finished_s.values()) - min(self.finished_s.values()) if self.all_finished else None

    def decode_s(self, index: int) -> float | None:
        """From a choice's first token to its end."""
        return self.finished_s[index] - self.first_seen_s[index] if index in self.finished_s else None
