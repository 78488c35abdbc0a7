"""Places a part of a group on a worker, and on another worker each time that its worker is lost.

1. `place`      gives the part to its first worker. If that worker refuses it, `lose` tries others
2. `lose`       the worker is lost. If `Moves` allows a move, a task starts (`_move`); otherwise the part is over
3. the task     waits for a worker, prefills the prompt again if that pays, and places the unfinished choices. If the
                reader is cancelled, the task continues
4. `resumed`    the first delta of the new worker has arrived: the move is over

Only `PartMover` changes the worker, the tickets and the state of a part."""

import asyncio
import logging

import msgspec

from motet.errors import EngineClosedError, MotetError
from motet.log import ONCE_A_MINUTE
from motet.routing.choosing.survey import readers_of
from motet.routing.groups.dispatch import Dispatcher
from motet.routing.groups.migration import GENERATING, Cause, GroupState, MoveOutcome, Moves, cause_of, transition
from motet.routing.groups.placement import Placement
from motet.routing.groups.tickets import HeldTicket
from motet.routing.groups.unfinished import Unfinished
from motet.tracing.spans import NO_SPAN

logger = logging.getLogger(__name__)

NO_WORKER_NOW = "no worker can continue a group: such groups wait up to %g s for one (--migration-wait)"


class _Ended(Exception):
    """Raised when a part cannot move: it is over, with an error or because nothing is left to generate."""

    def __init__(self, error: MotetError | None) -> None:
        super().__init__()
        self.error = error


class PartMover:
    """The worker that a part is on, and the moves to other workers."""

    def __init__(
        self, unfinished: Unfinished, *, dispatcher: Dispatcher, moves: Moves, held: HeldTicket | None
    ) -> None:
        self.state = GroupState.QUEUED
        self.placement: Placement | None = None
        """The placement on the current worker or, during a move, on the last worker. None before the first worker."""
        self.error: MotetError | None = None
        """The error that ended the part. None if the part is not over, or has ended without an error."""
        self._held = held
        """The ticket that the part may still read. None if the part has acknowledged or released it, or has none."""
        self._tickets = [] if held is None else [held]
        """All tickets that the part has had."""
        self._unfinished = unfinished
        self._dispatcher = dispatcher
        self._moves = moves
        self._placements = 0
        """Number of workers that the part has had."""
        self._moving: asyncio.Task[None] | None = None
        self._closing = False
        """True once the server is closing."""
        self._span = NO_SPAN
        """The span of the current move."""

    def place(self) -> None:
        """Gives the unfinished choices to a worker, with the ticket if a worker can read it. Raises NoWorkerError, or
        the error of the worker's engine."""
        request = self._unfinished.remaining_request(self._placements)
        if (held := self._held) is not None:
            if readers_of(held.ticket, self._dispatcher.fleet, model=request.model).members:
                request = msgspec.structs.replace(request, ticket=held.ticket)
            else:
                self._release_ticket()
        try:
            self.placement = self._dispatcher.place(request, self._unfinished)
        except BaseException:
            self._release_ticket()
            raise
        if self._held is not None and self._held.from_client:
            self._acknowledge_ticket()  # from now on the worker acknowledges the lease
        self._placements += 1
        self._go(GENERATING)

    def resumed(self) -> None:
        """Called for the first delta of each placement, before the placement records it."""
        self._moves.resumed(self._unfinished)
        self._end_span(None)
        self._acknowledge_ticket()

    def lose(self, error: MotetError) -> None:
        """Moves or ends the part, because its worker is lost or has refused it."""
        self._release_ticket()
        try:
            cause = self._cause_to_move(error)
        except _Ended as end:
            self.end(end.error)
        else:
            self._go(GroupState.MOVING)
            if self._span is NO_SPAN:
                group = self._dispatcher.tracer.of(self._unfinished.request.traceparent)
                self._span = group.child("move", {"motet.move.cause": cause.value})
            self._moving = asyncio.create_task(self._move(cause, error))

    def end(self, error: MotetError | None) -> None:
        """Ends the part, with an error or because all its choices have ended. A second call changes nothing."""
        if self.state is GroupState.OVER:
            return
        self.error = error
        self._go(GroupState.OVER)
        self._release_ticket()
        self._moves.end(MoveOutcome.CLOSED)
        self._end_span(error)
        if self.placement is not None:
            self.placement.close()

    def interrupt(self, error: MotetError | None) -> None:
        """Ends the part, even while it moves."""
        self.end(error)
        if self._moving is not None:
            self._moving.cancel()

    def abandon(self) -> None:
        """Ends a move in progress, because the server is closing. The part cannot move any more."""
        self._closing = True
        if self._moving is not None and not self._moving.done():
            self.interrupt(EngineClosedError("the server is closing"))

    async def wait_moved(self) -> None:
        """Waits until the part is on a worker or is over."""
        while self.state not in (GENERATING, GroupState.OVER):
            moving = self._moving
            assert moving is not None  # neither on a worker nor over
            await asyncio.wait((moving,))  # if the reader is cancelled, the move continues
            if not moving.cancelled():
                moving.result()  # if the task failed because of a defect, the reader gets the error

    async def close(self) -> None:
        """Waits until nothing of the part is left. `interrupt` must be called before."""
        if self._moving is not None:
            await asyncio.wait((self._moving,))
        if self.placement is not None:
            await self.placement.stream.aclose()
        for held in self._tickets:
            await held.wait_released()

    def _acknowledge_ticket(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.acknowledge()

    def _release_ticket(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.release()

    def _cause_to_move(self, error: MotetError) -> Cause:
        """Returns the cause of the move after `error`. Raises _Ended if the part must not move."""
        if not self._unfinished:
            raise _Ended(None)
        if self._closing:
            raise _Ended(EngineClosedError("the server is closing"))
        cause = cause_of(error)
        if cause is None and not isinstance(error, EngineClosedError):
            self._moves.end(MoveOutcome.FAILED)
        if cause is None or not self._moves.start(cause, started=self._unfinished.started):
            raise _Ended(error)
        return cause

    async def _move(self, cause: Cause, error: MotetError) -> None:
        """Tries workers until one accepts the part, or the part is over."""
        former = self.placement
        if former is not None:
            await former.stream.aclose()
        fleet, model = self._dispatcher.fleet, self._unfinished.request.model
        try:
            while self.state is not GENERATING:
                patience_s = self._moves.patience_s(cause, worker_expected=fleet.catalog.serving(model).worker_expected)
                if patience_s is None:
                    raise _Ended(error)
                if patience_s > 0:
                    if cause is Cause.NO_WORKER:
                        logger.warning(NO_WORKER_NOW, self._moves.wait_s, extra=ONCE_A_MINUTE)
                    await fleet.changes.wait_at_most(patience_s)
                try:
                    await self._submit()
                except MotetError as refusal:
                    self._go(GroupState.MOVING)
                    cause = self._cause_to_move(refusal)
            self._log_move(cause, former)
        except _Ended as end:
            self.end(end.error)

    async def _submit(self) -> None:
        """Gives the part to a worker. Requests a prefill of its prompt first, if that pays."""
        request = self._unfinished.remaining_request(self._placements)
        prefiller = self._dispatcher.prefiller
        if prefiller.pays(request):
            self._go(GroupState.PREFILLING)
            prefiller.in_progress.add(self._unfinished)
            try:
                ticket = await prefiller.ticket(request)
            finally:
                prefiller.in_progress.discard(self._unfinished)
            if ticket is not None:
                self._held = HeldTicket(ticket, self._dispatcher.releases, parts=1, trace=request.trace)
                self._tickets.append(self._held)
                self._unfinished.prompt.prefill_worker = prefiller.maker_of(ticket)
        self.place()

    def _log_move(self, cause: Cause, former: Placement | None) -> None:
        """`former`: the placement on the last worker. None if no worker had accepted the part."""
        request, placement = self._unfinished.request, self.placement
        fields = {
            "request_id": request.trace,
            "group": request.request_id,
            "cause": cause.value,
            "choices": len(self._unfinished),
            "output_tokens": self._unfinished.output_tokens,
        }
        if former is not None and placement is not None:
            fingerprints = {used.worker.engine.info.fingerprint for used in (former, placement)}
            fields["fingerprint"] = "equal" if len(fingerprints) == 1 else "other"
            fields |= {"from": former.member.id, "to": placement.member.id}
        logger.warning("a group continues on another worker", extra={"fields": fields})
        traced = ("choices", "output_tokens", "fingerprint", "from", "to")
        self._span.note({f"motet.move.{name}": fields[name] for name in traced if name in fields})

    def _end_span(self, error: MotetError | None) -> None:
        span, self._span = self._span, NO_SPAN
        span.fail(error)

    def _go(self, state: GroupState) -> None:
        self.state = transition(self.state, state)
