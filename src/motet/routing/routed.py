"""The workers of a fleet as one engine.

    prefill       the prefill worker that is done with the prompt first; if it dies, or takes no more, the next one in
                  the same call
    generate      the worker that `choose` picks; a group stays where it is until it ends, with its worker or before.
                  With a ticket that no ready worker can read it goes without, and the ticket is given back here: who
                  gives tickets back itself asks `reads` before
    release       who can (`eligible.releaser`)
    stop_choice   where the group is

Closing it closes the workers.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count

import msgspec

from motet.engines.base import ANSWERING, Worker, WorkerState
from motet.errors import EngineClosedError, EngineDiedError, MotetError, NoWorkerError, OverloadedError
from motet.ids import ModelName, RequestId
from motet.routing.choose import Policy, Work, choose
from motet.routing.eligible import readers_of, releaser
from motet.routing.fleet import Fleet, Member
from motet.routing.load import Load
from motet.routing.routed_group import RoutedGroup
from motet.routing.survey import survey
from motet.routing.totals import common_info, total_stats
from motet.transfer.ticket import Ticket
from motet.types import EngineInfo, EngineStats, GenerateRequest

logger = logging.getLogger(__name__)


class Routed:
    """An `Engine` over the workers of a fleet."""

    def __init__(
        self, fleet: Fleet, policy: Policy = Policy.KV, *, left: Callable[[Ticket], None] = lambda _: None
    ) -> None:
        """`left`: told of tickets that nobody is there to give back."""
        self._left = left
        self._fleet = fleet
        self._policy = policy
        self._groups: dict[RequestId, RoutedGroup] = {}
        self._turns = {work: count() for work in Work}
        self._info: EngineInfo | None = None
        self._decisions = Counter[str]()
        self._releasing: set[asyncio.Task[None]] = set()
        self.routed_tokens = 0
        self.overlap_tokens = 0

    @property
    def info(self) -> EngineInfo:
        """What holds for any group on any worker that decodes; while none is up, what held last."""
        infos = [worker.engine.info for _, worker in self._present(Work.GENERATE)]
        if infos:
            self._info = common_info(infos)
        if self._info is None:
            raise self._none_up(Work.GENERATE)
        return self._info

    @property
    def decisions(self) -> Mapping[str, int]:
        """How often a worker was chosen, by what decided."""
        return self._decisions

    def generate(self, request: GenerateRequest) -> RoutedGroup:
        request = self._with_what_is_read(request)
        member, worker, load = self._chosen(Work.GENERATE, request)
        try:
            group = RoutedGroup(
                member,
                worker,
                request,
                uncached_tokens=load.own_tokens,
                failed=self._failed,
                ended=self._ended,
                freed=self._fleet.notify_room,
            )
        except (EngineDiedError, OverloadedError) as error:
            self._failed(member, worker, error)
            raise
        member.groups.add(group)
        self._groups[request.request_id] = group
        if request.session_id:
            self._fleet.sessions.keep(request.session_id, member.id)
        self.routed_tokens += len(request.prompt)
        self.overlap_tokens += len(request.prompt) - load.own_tokens
        return group

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        failures: list[MotetError] = []
        tried: list[str] = []
        while (chosen := self._next(Work.PREFILL, request, besides=tried, decided=True)) is not None:
            member, worker, load = chosen
            tried.append(member.id)
            try:
                return await self._prefill(member, worker, request, load, readers=readers)
            except (EngineDiedError, OverloadedError) as error:
                self._failed(member, worker, error)
                failures.append(error)
            except EngineClosedError as error:  # it is just leaving
                failures.append(error)
        full = [error for error in failures if isinstance(error, OverloadedError)]
        raise (full or failures or [self._none_up(Work.PREFILL, request.model)])[-1]

    async def release(self, ticket: Ticket) -> None:
        worker = releaser(ticket, self._fleet)
        if worker is not None:
            await worker.engine.release(ticket)
        else:
            self._left(ticket)
            logger.info("nobody can give back the ticket of %s: its lease ends by itself", ticket.remote_request_id)

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        if group := self._groups.get(request_id):
            await group.stop(index)

    async def stats(self) -> EngineStats:
        """Of all that decode and answer. NoWorkerError if none does."""
        answers = await asyncio.gather(*(self._stats_if_alive(*one) for one in self._present(Work.GENERATE)))
        alive = [stats for stats in answers if stats is not None]
        if not alive:
            raise self._none_up(Work.GENERATE)
        return total_stats(alive)

    async def close(self) -> None:
        workers = [member.worker for member in self._fleet.members if member.worker is not None]
        await asyncio.gather(*self._releasing)
        await asyncio.gather(*(worker.engine.close() for worker in workers))

    def has_prefill(self, model: ModelName) -> bool:
        return self._fleet.has_prefill(model)

    def ticket_readers(self, model: ModelName) -> int:
        return self._fleet.serving(model).ticket_readers

    def reads(self, ticket: Ticket, model: ModelName) -> bool:
        return bool(readers_of(ticket, self._fleet, model).members)

    def check_ready(self, model: ModelName) -> None:
        if not self._fleet.ready(Work.GENERATE, model):
            raise self._none_up(Work.GENERATE, model)

    def prefill_load(self, request: GenerateRequest) -> Load | None:
        chosen = self._next(Work.PREFILL, request)
        return None if chosen is None else chosen[2]

    def generate_load(self, request: GenerateRequest) -> Load:
        chosen = self._next(Work.GENERATE, request)
        if chosen is None:
            raise self._none_up(Work.GENERATE, request.model)
        return chosen[2]

    def check(self) -> None:
        """Raises unless every group has ended and the books are empty."""
        if self._groups:
            raise AssertionError(f"groups left open: {sorted(self._groups)}")
        if self._releasing:
            raise AssertionError(f"{len(self._releasing)} tickets are being given back")
        self._fleet.check()

    def _with_what_is_read(self, request: GenerateRequest) -> GenerateRequest:
        """Without its ticket if nobody of those who could write the group can read it."""
        ticket = request.ticket
        if ticket is None or self.reads(ticket, request.model) or not self._fleet.ready(Work.GENERATE, request.model):
            return request
        releasing = asyncio.create_task(self.release(ticket))
        self._releasing.add(releasing)
        releasing.add_done_callback(self._releasing.discard)
        return msgspec.structs.replace(request, ticket=None)

    async def _prefill(
        self, member: Member, worker: Worker, request: GenerateRequest, load: Load, *, readers: int
    ) -> Ticket:
        books = member.books
        reading = books.give(load.own_tokens)
        try:
            ticket = await worker.engine.prefill(request, readers=min(readers, worker.engine.info.ticket_readers))
        except BaseException:
            books.drop(reading)
            raise
        books.done(reading, computed_tokens=ticket.num_tokens - ticket.cached_tokens)
        return ticket

    def _present(self, work: Work) -> list[tuple[Member, Worker]]:
        return [(member, member.worker) for member in self._fleet.ready(work) if member.worker is not None]

    def _chosen(self, work: Work, request: GenerateRequest) -> tuple[Member, Worker, Load]:
        """Writes down why. Raises NoWorkerError."""
        chosen = self._next(work, request, decided=True)
        if chosen is None:
            raise self._none_up(work, request.model)
        return chosen

    def _next(
        self, work: Work, request: GenerateRequest, *, besides: Sequence[str] = (), decided: bool = False
    ) -> tuple[Member, Worker, Load] | None:
        turn = next(self._turns[work]) if decided else 0
        seen = survey(self._fleet, work, request, besides=besides, turn=turn)
        decision = seen and choose(seen.candidates, seen.wanted, self._policy, turn=turn)
        if not seen or not decision:
            return None
        member, worker = seen.present[decision.place]
        if decided:
            self._decisions[decision.reason] += 1
            member.last_decision = decision.why
            logger.debug("group %s goes to %s: %s", request.request_id, member.id, decision.why)
        return member, worker, seen.load(decision.place)

    async def _stats_if_alive(self, member: Member, worker: Worker) -> EngineStats | None:
        try:
            return await worker.engine.stats()
        except (EngineDiedError, EngineClosedError) as error:
            self._failed(member, worker, error)
            return None

    def _failed(self, member: Member, worker: Worker, error: MotetError) -> None:
        """What a worker did in a former life says nothing of this one."""
        if member.worker is not worker or self._fleet.get(member.id) is not member:
            return
        if isinstance(error, OverloadedError):
            member.refuse()
        elif member.state in ANSWERING:  # else its keeper knows better
            self._fleet.mark(member.id, WorkerState.DEAD, error.message)

    def _ended(self, group: RoutedGroup) -> None:
        group.member.groups.discard(group)
        if self._groups.get(group.request.request_id) is group:
            del self._groups[group.request.request_id]
        self._fleet.notify()

    def _none_up(self, work: Work, model: str = "") -> NoWorkerError:
        members = [member for member in self._fleet.members if not member.text and member.may_have(model)]
        known = ", ".join(f"{member.id} is {member.state}" for member in members) or "there is none"
        return NoWorkerError(f"no worker can {work.name.lower()} now: {known}")
