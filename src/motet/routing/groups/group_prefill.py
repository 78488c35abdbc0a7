"""The ticket of a group until its parts own it. The client sent the ticket, or a prefill worker grants it."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from motet.errors import NoWorkerError
from motet.routing.groups.dispatch import Dispatcher
from motet.routing.groups.prefiller import Prefiller
from motet.routing.groups.tickets import HeldTicket, TicketReleases
from motet.routing.groups.unfinished import Unfinished

Place = Callable[[list[int]], None]
"""Places the choices of the group, in parts of these sizes."""


class GroupPrefill:
    """Owns the ticket until `take`, and the task that waits for prefill."""

    def __init__(self, unfinished: Unfinished, dispatcher: Dispatcher) -> None:
        self._unfinished = unfinished
        self._prefiller: Prefiller = dispatcher.prefiller
        self._releases: TicketReleases = dispatcher.releases
        self._task: asyncio.Task[None] | None = None
        request = unfinished.request
        self._held: HeldTicket | None = None
        if request.ticket is not None:
            self._held = HeldTicket(request.ticket, self._releases, parts=1, trace=request.trace, from_client=True)

    def pays(self) -> bool:
        """Returns True if a prefill worker should compute the prompt. Raises NoWorkerError if no worker can decode."""
        return self._held is None and self._prefiller.pays(self._unfinished.remaining_request(0))

    def start(self, sizes: list[int], *, place: Place, fail: Callable[[Exception], None]) -> None:
        """Starts a task that gets a ticket and then calls `place`. `fail`: called with any error of the task."""
        self._prefiller.in_progress.add(self._unfinished)
        self._task = asyncio.create_task(self._run(sizes, place=place, fail=fail))

    def take(self) -> HeldTicket | None:
        """Returns the ticket, which the parts of the group own from then on."""
        held, self._held = self._held, None
        return held

    def cancel(self) -> None:
        """Ends the wait for prefill."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Waits until the task has ended. Releases a ticket that the parts have not taken."""
        try:
            if self._task is not None:
                await asyncio.wait((self._task,))
            if (held := self.take()) is not None:
                held.release()
                await held.wait_released()
        finally:
            self._prefiller.in_progress.discard(self._unfinished)

    async def _run(self, sizes: list[int], *, place: Place, fail: Callable[[Exception], None]) -> None:
        try:
            async with self._prefiller.turn(self._unfinished.request, parts=len(sizes)) as turn:
                if len(sizes) > 1 or not self._prompt_has_arrived():
                    sizes = await self._get_ticket(sizes)
                    turn.failed = self._held is None
                self._prefiller.in_progress.discard(self._unfinished)
                place(sizes)
        except Exception as error:  # the reader of the group raises it
            fail(error)

    def _prompt_has_arrived(self) -> bool:
        """Returns True if no prefill is needed any more, because the decode worker that would get the group has
        received the prompt for another group."""
        with suppress(NoWorkerError):
            return not self._prefiller.pays(self._unfinished.remaining_request(0))
        return False

    async def _get_ticket(self, sizes: list[int]) -> list[int]:
        """Gets a ticket, and returns the sizes of the parts that can use it. Without a ticket every part would compute
        the prompt, so the group gets one part."""
        request = self._unfinished.request
        ticket = await self._prefiller.ticket(request, readers=len(sizes))
        if ticket is None or ticket.readers < len(sizes):
            sizes = [len(self._unfinished)]
        if ticket is not None:
            self._held = HeldTicket(ticket, self._releases, parts=len(sizes), trace=request.trace)
        return sizes
