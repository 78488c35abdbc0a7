"""The groups that a server knows by their ids: those of answers under way, and those whose prompt is kept for more
choices (`keep_s`). Only the client that asked for a group finds it.

    opened    a part of the group's answers begins: the first one, or one with more choices
    closed    a part is over. With the last one the group is forgotten, now or when its prompt's time is up
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec
from starlette.responses import Response

from motet.api.failure import invalid_value
from motet.errors import NotFoundError
from motet.types import ChoiceStart, FinishReason

MAX_KEPT = 1024
"""Groups that are known after their answers; those that ended first are forgotten first."""
MAX_CHOICES = 16_384
"""Choices that a group may have, with all that were added."""


class ChoiceState(StrEnum):
    WAITING = "waiting"
    """It has not begun."""
    WRITING = "writing"
    OVER = "over"
    DROPPED = "dropped"
    """It never began, and never will."""


class ChoiceReport(msgspec.Struct, frozen=True):
    index: int
    state: ChoiceState
    tokens: int | None
    """Output tokens so far; None if only another server knows them."""
    finish_reason: FinishReason | None


class KnownPart(Protocol):
    """Choices of a group that are in one answer."""

    def choices(self) -> Sequence[ChoiceReport]: ...

    async def end_choice(self, index: int) -> bool:
        """Ends a choice where it is. Returns False if it is over already."""
        ...

    async def end_all(self) -> None: ...


@dataclass(frozen=True)
class MoreAsked:
    """A request for more choices of a group."""

    n: int
    stream: bool
    include_usage: bool


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
    more: Callable[["KnownGroup", MoreAsked], Response] | None = None
    """Makes an answer with more choices; None if there can be none."""
    parts: list[KnownPart] = field(default_factory=list)
    num_open: int = 0
    """Number of parts that are not over."""
    until_s: float | None = None
    """When it is forgotten; None while a part is open."""

    def take_starts(self, count: int) -> tuple[ChoiceStart, ...]:
        """Returns the next choices; seeds go on from those of the group. Raises RequestError if they are too many."""
        if self.next_index + count > MAX_CHOICES:
            why = f"the group has {self.next_index} choices, and may have {MAX_CHOICES} in all"
            raise invalid_value("n", why)
        first, self.next_index = self.next_index, self.next_index + count
        return tuple(ChoiceStart(index, (self.first_seed + index) % 2**64) for index in range(first, first + count))

    def choices(self) -> list[ChoiceReport]:
        """Returns all choices, in the order of their indices."""
        return sorted((one for part in self.parts for one in part.choices()), key=lambda one: one.index)

    async def end_choice(self, index: int) -> bool:
        """Raises NotFoundError if the group has no such choice."""
        for part in self.parts:
            if any(one.index == index for one in part.choices()):
                return await part.end_choice(index)
        raise NotFoundError(f"Group {self.id} has no choice {index}.", code="choice_not_found")


class KnownGroups:
    """Owned by the service of a server."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[str, KnownGroup] = {}
        self._kept: OrderedDict[str, KnownGroup] = OrderedDict()
        """Groups whose answers are over, in the order in which they ended."""

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
        self._kept.pop(group.id, None)
        self._open[group.id] = group
        group.parts.append(part)
        group.num_open += 1
        group.until_s = None

    def closed(self, group: KnownGroup) -> None:
        """To be called once for each part that was opened."""
        group.num_open -= 1
        if group.num_open:
            return
        del self._open[group.id]
        self._forget_late()
        if group.keep_s > 0:
            group.until_s = self._clock() + group.keep_s
            self._kept[group.id] = group
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)

    def forget(self, group: KnownGroup) -> None:
        """Forgets a group whose answers are over."""
        self._kept.pop(group.id, None)

    def left_s(self, group: KnownGroup) -> float | None:
        """Returns the seconds for which a group is still known; None while it is under way."""
        return None if group.until_s is None else max(0.0, group.until_s - self._clock())

    def _forget_late(self) -> None:
        now_s = self._clock()
        late = [id for id, group in self._kept.items() if group.until_s is not None and group.until_s <= now_s]
        for id in late:
            del self._kept[id]
