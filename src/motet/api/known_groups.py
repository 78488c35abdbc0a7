"""The groups that a server knows by their ids: those of answers under way, and those whose prompt is kept for more
choices (`keep_s`). Only the client that asked for a group finds it.

    opened    a part of the group's answers begins: the first one, or one with more choices
    closed    a part is over. With the last one the group is forgotten, now or when its prompt's time is up
"""

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec
from msgspec.structs import replace
from starlette.responses import Response

from motet.api.http.failure import invalid_value
from motet.api.http.request_spans import NO_REQUEST_SPAN, RequestSpan
from motet.errors import NotFoundError
from motet.types import ChoiceStart, FinishReason

MAX_KEPT = 1024
"""Groups that are known after their answers."""
MAX_KEPT_BYTES = 256 * 2**20
"""Most memory of such groups. If they are more, or have more, the client with most of them loses its oldest one."""
GROUP_BYTES, BODY_FACTOR, CHOICE_BYTES = 4096, 40, 200
"""What a group takes, for each byte of its request (8 KiB of stop strings make a search of 320 KiB), and a choice."""
MAX_CHOICES = 16_384
"""Choices that a group may have, with all that were added."""


class ChoiceState(StrEnum):
    WAITING = "waiting"
    """It has not begun."""
    WRITING = "writing"
    OVER = "over"
    """It has ended; without a finish reason if its answer was broken off."""
    DROPPED = "dropped"
    """It never began, and never will."""


def choice_state(
    index: int, *, ended: Container[int], unfinished: Container[int], waiting: Container[int]
) -> ChoiceState:
    """Returns the state of a choice. `ended`: choices with a finish reason; `waiting`: those of the unfinished choices
    that have not started."""
    if index in ended:
        return ChoiceState.OVER
    if index in unfinished:
        return ChoiceState.WAITING if index in waiting else ChoiceState.WRITING
    return ChoiceState.DROPPED


class ChoiceReport(msgspec.Struct, frozen=True):
    index: int
    state: ChoiceState
    tokens: int | None
    """Output tokens so far; None if only another server knows them."""
    finish_reason: FinishReason | None
    worker: str | None = None
    """The worker that writes it, or wrote last; None while it is not known."""


class KnownPart(Protocol):
    """Choices of a group that are in one answer."""

    def choices(self) -> Sequence[ChoiceReport]: ...

    async def end_choice(self, index: int) -> bool:
        """Ends a choice where it is. Returns False if it is over already."""
        ...

    async def end_all(self) -> None: ...


@dataclass(frozen=True)
class MoreChoices:
    """A request for more choices of a group."""

    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    span: RequestSpan = NO_REQUEST_SPAN


@dataclass(eq=False, kw_only=True)
class KnownGroup:
    """One prompt of a request, with the choices of all its answers."""

    id: str
    client: str
    """Who asked for it."""
    model: str
    created: int
    prompt_tokens: int | None
    """None if only another server knows them."""
    keep_s: float = 0.0
    first_seed: int = 0
    next_index: int = 0
    """The index of the next choice, if more are asked for."""
    body_bytes: int = 0
    """Size of its request."""
    more: Callable[["KnownGroup", MoreChoices], Response] | None = None
    """Makes an answer with more choices; None if there can be none."""
    open: list[KnownPart] = field(default_factory=list)
    """The parts that are not over."""
    over: dict[int, ChoiceReport] = field(default_factory=dict)
    """The choices of those that are."""
    until_s: float | None = None
    """When it is forgotten; None while a part is open."""

    def take_starts(self, count: int) -> tuple[ChoiceStart, ...]:
        """Returns the next choices; seeds go on from those of the group. Raises RequestError if they are too many."""
        if self.next_index + count > MAX_CHOICES:
            why = f"the next choice is number {self.next_index}, and those of a group end before {MAX_CHOICES}"
            raise invalid_value("n", why)
        first, self.next_index = self.next_index, self.next_index + count
        return tuple(ChoiceStart(index, (self.first_seed + index) % 2**64) for index in range(first, first + count))

    def give_back(self, starts: Sequence[ChoiceStart]) -> None:
        """Takes back choices that could not begin, unless others were taken after them."""
        if self.next_index == starts[-1].index + 1:
            self.next_index = starts[0].index

    @property
    def num_bytes(self) -> int:
        """About the memory that it takes once its answers are over."""
        return GROUP_BYTES + BODY_FACTOR * self.body_bytes + CHOICE_BYTES * len(self.over)

    def choices(self) -> list[ChoiceReport]:
        """Returns all choices, in the order of their indices."""
        reports = self.over | {one.index: one for part in self.open for one in part.choices()}
        return [reports[index] for index in sorted(reports)]

    async def end_choice(self, index: int) -> bool:
        """Raises NotFoundError if the group has no such choice."""
        for part in self.open:
            if any(one.index == index for one in part.choices()):
                return await part.end_choice(index)
        if index in self.over:
            return False
        raise NotFoundError(f"Group {self.id} has no choice {index}.", code="choice_not_found")


class KnownGroups:
    """Owned by the service of a server."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[str, KnownGroup] = {}
        self._kept: dict[str, KnownGroup] = {}
        """Groups whose answers are over, in the order in which they ended."""
        self._bytes_of: Counter[str] = Counter()
        """The memory of each client's kept groups."""

    def __len__(self) -> int:
        return len(self._open) + len(self._kept)

    def find(self, id: str, *, client: str) -> KnownGroup:
        """Raises NotFoundError, also for a group of somebody else."""
        self._forget_late()
        group = self._open.get(id) or self._kept.get(id)
        if group is None or group.client != client:
            raise NotFoundError(f"No group {id!r} is under way or kept here.", code="group_not_found")
        return group

    def opened(self, group: KnownGroup, part: KnownPart) -> None:
        self._drop(group.id)
        self._open[group.id] = group
        group.open.append(part)
        group.until_s = None

    def closed(self, group: KnownGroup, part: KnownPart) -> None:
        """To be called once for each part that was opened."""
        group.open.remove(part)
        group.over |= {one.index: ended(one) for one in part.choices()}
        if group.open:
            return
        del self._open[group.id]
        self._forget_late()
        if group.keep_s > 0:
            group.until_s = self._clock() + group.keep_s
            self._kept[group.id] = group
            self._bytes_of[group.client] += group.num_bytes
            while len(self._kept) > MAX_KEPT or self._bytes_of.total() > MAX_KEPT_BYTES:
                ((most, _),) = self._bytes_of.most_common(1)
                self._drop(next(id for id, kept in self._kept.items() if kept.client == most))

    def forget(self, group: KnownGroup) -> None:
        """Forgets a group, as soon as its answers are over."""
        group.keep_s = 0.0
        self._drop(group.id)

    def left_s(self, group: KnownGroup) -> float | None:
        """Returns the seconds for which a group is still known; None while it is under way."""
        return None if group.until_s is None else max(0.0, group.until_s - self._clock())

    def _forget_late(self) -> None:
        now_s = self._clock()
        for id in [id for id, group in self._kept.items() if group.until_s is not None and group.until_s <= now_s]:
            self._drop(id)

    def _drop(self, id: str) -> None:
        """Takes a group from those that are kept, if it is one."""
        group = self._kept.pop(id, None)
        if group is not None:
            self._bytes_of[group.client] -= group.num_bytes
            if not self._bytes_of[group.client]:
                del self._bytes_of[group.client]


def ended(report: ChoiceReport) -> ChoiceReport:
    """Returns the report on a choice whose answer is over, whether or not it has ended by itself."""
    match report.state:
        case ChoiceState.WAITING:
            return replace(report, state=ChoiceState.DROPPED)
        case ChoiceState.WRITING:
            return replace(report, state=ChoiceState.OVER)
        case ChoiceState.OVER | ChoiceState.DROPPED:
            return report
