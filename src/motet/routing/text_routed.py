"""Gives requests for text models to a member that takes texts, and to another one if that fails.

chosen by    1. no refusal or failure a moment ago       2. fewest open choices; the session's last member counts as
             having `STAY_CHOICES` fewer                 3. longest time since its last request
tried again  once, on another member if there is one, and only before anything has come: after that a request ends
             with its member, since nobody can continue a text that another has begun
"""

import logging
from collections.abc import Sequence

import msgspec

from motet.engines.upstream.text_source import TextGenerate, TextGroupStream, TextRequest, TextStep, may_go_elsewhere
from motet.errors import MotetError, NoWorkerError, RateLimitedError, UpstreamRefusalError, WorkerFaultError
from motet.routing.choosing.cost import WorkKind
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.member import Member
from motet.types import FinishReason, Usage

logger = logging.getLogger(__name__)

STAY_CHOICES = 8
"""The last member of a session is taken even if it has up to this many more open choices than the others."""
TRIES = 2


class TextRouted:
    """Generates with all text models of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._sources: dict[str, TextGenerate] = {}
        self._given: dict[str, int] = {}
        """The turn in which each member got its last request."""
        self._turn = 0

    def put(self, id: str, generate: TextGenerate) -> None:
        """Sets what generates for a member. Must be called before the fleet learns that the member is ready."""
        self._sources[id] = generate

    def remove(self, id: str) -> None:
        """Forgets a member that has left."""
        self._sources.pop(id, None)
        self._given.pop(id, None)

    def generate(self, request: TextRequest) -> "RoutedText":
        return RoutedText(self, request)

    def of(self, model: str) -> TextGenerate:
        """Returns what generates with one model, by its members' name, whatever name clients use for it."""
        return lambda request: self.generate(msgspec.structs.replace(request, model=model))

    def choose(self, request: TextRequest, *, tried: Sequence[Member]) -> tuple[Member, TextGenerate]:
        """Returns the member for a request, if possible none of `tried`. Raises NoWorkerError if none has the model."""
        members = [member for member in self.fleet.texts(request.model) if member.id in self._sources]
        if not members:
            raise NoWorkerError(f"No server that has the model `{request.model}` answers at this moment.")
        stayed = self.fleet.sessions[WorkKind.GENERATE].worker_of(request.session_id)

        def rank(member: Member) -> tuple[bool, bool, int, int]:
            open_choices = member.open_choices - (STAY_CHOICES if member.id == stayed else 0)
            return member in tried, member.refused, open_choices, self._given.get(member.id, 0)

        chosen = min(members, key=rank)
        self._turn += 1
        self._given[chosen.id] = self._turn
        self.fleet.sessions[WorkKind.GENERATE].keep(request.session_id, chosen.id)
        chosen.last_decision = _why(chosen, members, stays=chosen.id == stayed, tried=tried)
        return chosen, self._sources[chosen.id]


class RoutedText:
    """A group on whichever member it is; a `TextGroupStream`."""

    def __init__(self, routed: TextRouted, request: TextRequest) -> None:
        self._routed = routed
        self._request = request
        self._tried: list[Member] = []
        self._group: TextGroupStream | None = None
        self._open_choices = 0
        """The choices in the books of the present member."""
        self._to_end: set[int] = set()
        """Choices that were ended here, and whose last pieces have not been read."""
        self._begun = False
        self._closed = False
        self._error: MotetError | None = None
        """What ended it on the member before."""

    @property
    def worker(self) -> str:
        return self._tried[-1].id if self._tried else ""

    @property
    def usage(self) -> Usage | None:
        return None if self._group is None else self._group.usage

    async def read(self) -> Sequence[TextStep]:
        while True:
            group = self._group or self._open()
            try:
                steps = await self._read(group)
            except MotetError as error:
                await self._leave()
                if not self._may_try_again(error):
                    raise
                self._error = error
            else:
                self._note(steps)
                return steps

    async def _read(self, group: TextGroupStream) -> Sequence[TextStep]:
        """Raises MotetError, whatever its server has sent."""
        try:
            return await group.read()
        except MotetError:
            raise
        except Exception as error:
            logger.exception("an answer of %s could not be taken", self.worker)
            raise WorkerFaultError(
                f"its answer could not be taken ({type(error).__name__}): the log has more"
            ) from error

    def start(self, indices: Sequence[int]) -> None:
        assert self._request.start is not None  # else none is held back
        self._request = msgspec.structs.replace(self._request, start=(*self._request.start, *indices))
        if self._group is not None:
            self._group.start(indices)
            self._ended(-len(indices))

    def end_choice(self, index: int) -> None:
        """May also be called while no member has the request: the next one ends the choice before it is asked for."""
        self._to_end.add(index)
        if self._group is not None:
            self._group.end_choice(index)

    def fail(self, error: MotetError) -> None:
        if self._group is not None:
            self._group.fail(error)

    def look(self) -> int:
        return 0  # its server has a time-out of its own

    def renewed(self, model_digest: str) -> None:
        """Does nothing: nobody knows the weights of a server that takes texts."""

    async def evict(self, error: MotetError) -> None:
        """Called by the fleet when the member leaves, or is lost."""
        self.fail(error)

    async def aclose(self) -> None:
        self._closed = True
        await self._leave()

    def _open(self) -> TextGroupStream:
        try:
            member, generate = self._routed.choose(self._request, tried=self._tried)
        except NoWorkerError as error:
            raise self._error or error from None
        self._tried.append(member)
        self._group = generate(self._request)
        self._books, self._open_choices = member.books, self._request.num_started
        self._books.open_choices += self._open_choices
        member.groups.add(self)
        for index in self._to_end:
            self._group.end_choice(index)
        return self._group

    def _note(self, steps: Sequence[TextStep]) -> None:
        ended = [piece for step in steps for piece in step.pieces if piece.finish is not None]
        # A server that gives up with a word like that gets its group an error, so these were ended here.
        here = {piece.index for piece in ended if piece.finish is FinishReason.ABORT}
        if here and self._request.start is not None:
            self._to_end -= here
            left = tuple(index for index in self._request.start if index not in here)
            self._request = msgspec.structs.replace(self._request, start=left)
        if not here or sum(len(step.pieces) for step in steps) > len(here):
            self._begun = True
            self._tried[-1].stirred = True
        if self._group is not None:
            self._ended(len(ended))
            if not steps:
                self._off_the_books()

    def _may_try_again(self, error: MotetError) -> bool:
        """Returns True if another member should be asked; notes that this one refused or failed."""
        elsewhere = may_go_elsewhere(error)
        if isinstance(error, WorkerFaultError):
            self._routed.fleet.distrust(self._tried[-1].id, why=error.message)
        if elsewhere or (isinstance(error, UpstreamRefusalError) and error.status == RateLimitedError.status):
            self._tried[-1].refuse()
        return elsewhere and not self._begun and not self._closed and len(self._tried) < TRIES

    async def _leave(self) -> None:
        """Takes the request from its member, whatever its result."""
        group, self._group = self._group, None
        if group is not None:
            self._off_the_books()
            await group.aclose()

    def _ended(self, num_choices: int) -> None:
        self._open_choices -= num_choices
        self._books.open_choices -= num_choices

    def _off_the_books(self) -> None:
        """May be called twice."""
        self._ended(self._open_choices)
        self._tried[-1].groups.discard(self)
        self._routed.fleet.notify()


def _why(chosen: Member, members: Sequence[Member], *, stays: bool, tried: Sequence[Member]) -> str:
    if chosen in tried:
        return "tried once more: there is no other"
    if tried:
        return f"after {tried[-1].id} failed"
    if stays:
        return f"its session was here, {chosen.open_choices} open choices"
    return f"{chosen.open_choices} open choices, the fewest of {len(members)}"
