"""The groups that a server knows by their ids: groups with answers in progress, and groups whose prompt is kept for
more choices (`keep_s`). Only the client that requested a group can find it.

    opened    an answer of the group starts: the first one, or an answer with more choices
    closed    an answer has ended. With the last one the group is forgotten, at once or after `keep_s`

Reports on the choices of a group are made `REPORTS` at a time, in several iterations of the event loop.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Protocol

import msgspec
from msgspec.structs import replace
from starlette.responses import Response

from motet.api.http.failure import invalid_value
from motet.api.http.request_spans import NO_REQUEST_SPAN, RequestSpan
from motet.errors import NotFoundError
from motet.loop_budget import batched_within_loop_budget
from motet.types import ChoiceStart, FinishReason

MAX_KEPT = 1024
"""Maximum number of groups that are known after the end of their answers."""
MAX_KEPT_BYTES = 256 * 2**20
"""Maximum memory of these groups. If there are too many groups, or if they take too much memory, the client with the
highest number or the most memory loses its oldest group."""
GROUP_BYTES, BODY_FACTOR, CHOICE_BYTES = 4096, 40, 200
"""Estimated bytes per group, per byte of its request (8 KiB of stop strings compile to 320 KiB), and per choice."""
MAX_CHOICES = 16_384
"""Maximum number of choices of a group, including choices that were added later."""
REPORTS = 512
"""Number of choices that are reported at a time. They take about a millisecond."""

_INDEX = attrgetter("index")


class ChoiceState(StrEnum):
    WAITING = "waiting"
    """The choice has not started."""
    WRITING = "writing"
    """The choice is running."""
    OVER = "over"
    """The choice has ended, without a finish reason if its answer was cut off."""
    DROPPED = "dropped"
    """The choice did not start before the end of its answer."""


def choice_state(
    index: int, *, ended: Container[int], unfinished: Container[int], waiting: Container[int]
) -> ChoiceState:
    """Returns a choice's state. `ended`: choices with a finish reason. `waiting`: unfinished, and not started."""
    if index in ended:
        return ChoiceState.OVER
    if index in unfinished:
        return ChoiceState.WAITING if index in waiting else ChoiceState.WRITING
    return ChoiceState.DROPPED


class ChoiceReport(msgspec.Struct, frozen=True, gc=False):
    index: int
    state: ChoiceState
    tokens: int | None
    """Number of output tokens so far; None if only another server knows it."""
    finish_reason: FinishReason | None
    worker: str | None = None
    """Worker that generates the choice, or generated it last; None if it is not known."""


class OpenAnswer(Protocol):
    """An answer in progress, with some choices of a group. The implementations are `TokenGroup` and `SteeredPrompt`."""

    def choices(self) -> Iterator[ChoiceReport]:
        """Yields the state of each choice, in the order of indices. The first `next` determines all states."""
        ...

    def has_choice(self, index: int) -> bool: ...

    def is_named(self, ids: Collection[str], *, sender: str) -> bool:
        """Returns True if the id of the answer, or the client's own id of the request, is one of these. Another client
        can guess the client's own id, so it counts only for the same sender: `GenerateRequest.client`."""
        ...

    async def end_choice(self, index: int) -> bool:
        """Ends a choice at its current position. Returns False if it had ended."""
        ...

    async def end_all(self) -> None: ...


@dataclass(frozen=True)
class MoreChoices:
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    span: RequestSpan = NO_REQUEST_SPAN


@dataclass
class FurtherChoices:
    """The indices and seeds of the choices that can be added to a group. They continue after its first choices."""

    first_seed: int = 0
    next_index: int = 0

    def take(self, count: int) -> tuple[ChoiceStart, ...]:
        """Returns the next choices. Raises RequestError if the group would have too many."""
        if self.next_index + count > MAX_CHOICES:
            why = f"the next choice is number {self.next_index}, and the numbers of a group end before {MAX_CHOICES}"
            raise invalid_value("n", why)
        first, self.next_index = self.next_index, self.next_index + count
        return tuple(ChoiceStart(index, (self.first_seed + index) % 2**64) for index in range(first, first + count))

    def put_back(self, starts: Sequence[ChoiceStart]) -> None:
        """Makes choices that could not start available again, unless other choices were taken after them."""
        if self.next_index == starts[-1].index + 1:
            self.next_index = starts[0].index


@dataclass(eq=False, kw_only=True)
class KnownGroup:
    """One prompt of a request, with the choices of all its answers."""

    id: str
    client: str
    model: str
    created: int
    prompt_tokens: int | None
    """Number of prompt tokens; None if only another server knows it."""
    keep_s: float = 0.0
    further: FurtherChoices = field(default_factory=FurtherChoices)
    body_bytes: int = 0
    more: Callable[["KnownGroup", MoreChoices], Response] | None = None
    """Makes an answer with more choices; None if choices cannot be added."""
    open: list[OpenAnswer] = field(default_factory=list)
    over: dict[int, ChoiceReport] = field(default_factory=dict)
    """Choices of the answers that have ended."""
    until_s: float | None = None
    """Time at which the group is forgotten; None while an answer is in progress."""

    @property
    def num_bytes(self) -> int:
        """Estimated memory of the group after the end of its answers."""
        return GROUP_BYTES + BODY_FACTOR * self.body_bytes + CHOICE_BYTES * len(self.over)

    def choices(self) -> Iterator[ChoiceReport]:
        """Yields the state of each choice, in the order of indices. The first `next` determines all states, but each
        report is made when it is needed: a group can have thousands."""
        over = [self.over[index] for index in sorted(self.over)]
        yield from heapq.merge(over, *(answer.choices() for answer in self.open), key=_INDEX)

    async def end_choice(self, index: int) -> bool:
        """Ends a choice now. Returns False if it had ended. Raises NotFoundError if the group has no such choice."""
        for answer in self.open:
            if answer.has_choice(index):
                return await answer.end_choice(index)
        if index in self.over:
            return False
        raise NotFoundError(f"Group {self.id} has no choice {index}.", code="choice_not_found")


class KnownGroups:
    """The groups that the service of a server knows."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[str, KnownGroup] = {}
        self._kept: dict[str, KnownGroup] = {}
        """Groups without an answer in progress, in the order in which their last answers ended."""
        self._bytes_of: Counter[str] = Counter()
        """Memory of the kept groups of each client."""

    def __len__(self) -> int:
        return len(self._open) + len(self._kept)

    def find(self, id: str, *, client: str) -> KnownGroup:
        """Returns a group by its id. Raises NotFoundError, also for a group of another client."""
        self._forget_expired()
        group = self._open.get(id) or self._kept.get(id)
        if group is None or group.client != client:
            raise NotFoundError(f"No group {id!r} is in progress or kept here.", code="group_not_found")
        return group

    def in_progress(self, ids: Collection[str], *, client: str, sender: str) -> list[KnownGroup]:
        """Returns the client's groups in progress whose id, or the id of whose answer (`OpenAnswer.is_named`), is among
        these."""
        own = (group for group in self._open.values() if group.client == client)
        return [
            group
            for group in own
            if group.id in ids or any(answer.is_named(ids, sender=sender) for answer in group.open)
        ]

    def opened(self, group: KnownGroup, answer: OpenAnswer) -> None:
        """Records that an answer of the group starts."""
        self._drop(group.id)
        self._open[group.id], group.until_s = group, None
        group.open.append(answer)

    async def closed(self, group: KnownGroup, answer: OpenAnswer) -> None:
        """Records that an answer has ended. Must be called once for each answer that was opened. If the group stays
        known, the answer stays open until its last reports have been made."""
        if group.keep_s > 0 or len(group.open) > 1:
            reports = await batched_within_loop_budget(map(ended, answer.choices()), REPORTS)
            group.over |= {report.index: report for part in reports for report in part}
        group.open.remove(answer)
        if group.open:
            return
        del self._open[group.id]
        if group.keep_s > 0:
            self._forget_expired()
            group.until_s = self._clock() + group.keep_s
            self._kept[group.id] = group
            self._bytes_of[group.client] += group.num_bytes
            while len(self._kept) > MAX_KEPT:
                self._drop_oldest_of(Counter(kept.client for kept in self._kept.values()))
            while self._bytes_of.total() > MAX_KEPT_BYTES:
                self._drop_oldest_of(self._bytes_of)

    def forget(self, group: KnownGroup) -> None:
        """Removes a group: at once, or at the end of its answers if any are in progress."""
        group.keep_s = 0.0
        self._drop(group.id)

    def left_s(self, group: KnownGroup) -> float | None:
        """Returns the remaining seconds for which a group is known; None while an answer is in progress."""
        return None if group.until_s is None else max(0.0, group.until_s - self._clock())

    def _forget_expired(self) -> None:
        now_s = self._clock()
        for id in [id for id, group in self._kept.items() if group.until_s is not None and group.until_s <= now_s]:
            self._drop(id)

    def _drop_oldest_of(self, use: Counter[str]) -> None:
        """Forgets the oldest kept group of the client with the highest use."""
        ((most, _),) = use.most_common(1)
        self._drop(next(id for id, kept in self._kept.items() if kept.client == most))

    def _drop(self, id: str) -> None:
        """Forgets a group if it is kept."""
        if (group := self._kept.pop(id, None)) is not None:
            self._bytes_of[group.client] -= group.num_bytes
            if not self._bytes_of[group.client]:
                del self._bytes_of[group.client]


AFTER_END = {ChoiceState.WAITING: ChoiceState.DROPPED, ChoiceState.WRITING: ChoiceState.OVER}


def ended(report: ChoiceReport) -> ChoiceReport:
    """Returns the report on a choice after the end of its answer, which can have been cut off."""
    return replace(report, state=AFTER_END.get(report.state, report.state))
