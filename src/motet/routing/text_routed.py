"""Requests for texts go to one of the members that take texts: which one, and where a request goes that failed there.

chosen by    1. it did not refuse or fail a moment ago   2. fewest open choices; where the session was last counts as
             `STAY_CHOICES` fewer                        3. it was given something longest ago
tried again  once, on another member if there is one, and only before anything has come: after that a request ends
             with its member, since nobody can go on with a text that another has begun
"""

from collections.abc import Sequence

import msgspec

from motet.engines.upstream.base import TextGroup, TextRequest, TextSource, TextStep, TextUsage, may_go_elsewhere
from motet.errors import MotetError, NoWorkerError, RateLimitedError, UpstreamRefusalError
from motet.routing.fleet import Fleet
from motet.routing.member import Member

STAY_CHOICES = 8
"""A session stays where it was as long as that is not busier than the others by more."""
TRIES = 2


class TextRouted:
    """`TextSource` for all text models of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._sources: dict[str, TextSource] = {}
        """By the id of the member."""
        self._given: dict[str, int] = {}
        """In which turn each member got its last request."""
        self._turn = 0

    def put(self, id: str, source: TextSource) -> None:
        """Who answers for a member; said before the fleet is told that it is ready."""
        self._sources[id] = source

    def remove(self, id: str) -> None:
        """It has left."""
        self._sources.pop(id, None)
        self._given.pop(id, None)

    def generate(self, request: TextRequest) -> "RoutedText":
        return RoutedText(self, request)

    def of(self, model: str) -> "OneText":
        """`TextSource` for one model, whatever name clients have for it."""
        return OneText(self, model)

    def choose(self, request: TextRequest, *, tried: Sequence[Member]) -> tuple[Member, TextSource]:
        """Raises NoWorkerError if nobody has the model now. One that was tried is taken only if there is no other."""
        members = [member for member in self.fleet.texts(request.model) if member.id in self._sources]
        if not members:
            raise NoWorkerError(f"No server that has the model `{request.model}` answers at this moment.")
        stayed = self.fleet.sessions.worker_of(request.session_id) if request.session_id else None

        def rank(member: Member) -> tuple[bool, bool, int, int]:
            open_choices = member.open_choices - (STAY_CHOICES if member.id == stayed else 0)
            return member in tried, member.refused, open_choices, self._given.get(member.id, 0)

        chosen = min(members, key=rank)
        self._turn += 1
        self._given[chosen.id] = self._turn
        if request.session_id:
            self.fleet.sessions.keep(request.session_id, chosen.id)
        chosen.last_decision = _why(chosen, members, stays=chosen.id == stayed, tried=tried)
        return chosen, self._sources[chosen.id]


class OneText:
    """One model of the fleet, by its members' name for it."""

    def __init__(self, routed: TextRouted, model: str) -> None:
        self._routed = routed
        self._model = model

    def generate(self, request: TextRequest) -> "RoutedText":
        return self._routed.generate(msgspec.structs.replace(request, model=self._model))


class RoutedText:
    """A group on whichever member it is; a `TextGroup`."""

    def __init__(self, routed: TextRouted, request: TextRequest) -> None:
        self._routed = routed
        self._request = request
        self._tried: list[Member] = []
        self._group: TextGroup | None = None
        self._stay: _Stay | None = None
        self._begun = False
        self._closed = False

    @property
    def worker(self) -> str:
        return self._tried[-1].id if self._tried else ""

    @property
    def usage(self) -> TextUsage | None:
        return None if self._group is None else self._group.usage

    async def read(self) -> Sequence[TextStep]:
        while True:
            group = self._group or self._open()
            try:
                steps = await group.read()
            except MotetError as error:
                await self._leave()
                if not self._may_try_again(error):
                    raise
            else:
                self._note(steps)
                return steps

    def fail(self, error: MotetError) -> None:
        if self._group is not None:
            self._group.fail(error)

    async def evict(self, error: MotetError) -> None:
        """For the fleet: its member leaves, or is lost."""
        self.fail(error)

    async def aclose(self) -> None:
        self._closed = True
        await self._leave()

    def _open(self) -> TextGroup:
        member, source = self._routed.choose(self._request, tried=self._tried)
        self._tried.append(member)
        self._group = source.generate(self._request)
        self._stay = _Stay(self, member, self._request.num_choices)
        return self._group

    def _note(self, steps: Sequence[TextStep]) -> None:
        self._begun = True
        self._tried[-1].stirred = True
        if self._stay is not None:
            self._stay.ended(sum(piece.finish is not None for step in steps for piece in step.pieces))
            if not steps:
                self._stay.leave()
                self._routed.fleet.notify()

    def _may_try_again(self, error: MotetError) -> bool:
        """Notes what the error says of the member."""
        elsewhere = may_go_elsewhere(error)
        if elsewhere or _too_much(error):
            self._tried[-1].refuse()
        return elsewhere and not self._begun and not self._closed and len(self._tried) < TRIES

    async def _leave(self) -> None:
        """Whatever came of it, the member has it no more."""
        group, self._group = self._group, None
        if self._stay is not None:
            self._stay.leave()
            self._stay = None
            self._routed.fleet.notify()
        if group is not None:
            await group.aclose()


class _Stay:
    """What the books of a member say of one group."""

    def __init__(self, group: RoutedText, member: Member, num_choices: int) -> None:
        self._group = group
        self._member = member
        self._books = member.books
        self._open_choices = num_choices
        self._books.open_choices += num_choices
        member.groups.add(group)

    def ended(self, num_choices: int) -> None:
        self._open_choices -= num_choices
        self._books.open_choices -= num_choices

    def leave(self) -> None:
        """May be called twice."""
        self.ended(self._open_choices)
        self._member.groups.discard(self._group)


def _too_much(error: MotetError) -> bool:
    """Whether it has reached a limit of its own."""
    return isinstance(error, UpstreamRefusalError) and error.status == RateLimitedError.status


def _why(chosen: Member, members: Sequence[Member], *, stays: bool, tried: Sequence[Member]) -> str:
    if chosen in tried:
        return "tried once more: there is no other"
    if tried:
        return f"after {tried[-1].id} failed"
    if stays:
        return f"its session was here, {chosen.open_choices} open choices"
    return f"{chosen.open_choices} open choices, the fewest of {len(members)}"
