"""The parts of a group on decode workers, and their deltas as one stream.

A group is one part. A large group can be several parts, each on a worker of its own; each part is placed, moved and
ended separately.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import islice

import msgspec

from motet.ids import RequestId
from motet.merge import Merge, deliver
from motet.routing.groups.dispatch import Dispatcher
from motet.routing.groups.migration import Moves
from motet.routing.groups.part import Part
from motet.routing.groups.tickets import HeldTicket
from motet.routing.groups.unfinished import Unfinished
from motet.types import GroupDelta

DELTAS_PER_PART = 2
"""A group of several parts has at most this number of unread deltas per part; above it, the parts wait for the
reader."""


class GroupParts:
    """The parts of one group; none until `place`."""

    def __init__(self, dispatcher: Dispatcher, *, moves: Callable[[], Moves]) -> None:
        """`moves`: makes the `Moves` of each part."""
        self.stream: Part | Merge[GroupDelta] | None = None
        """The deltas of the group. None before the parts have been placed."""
        self._dispatcher = dispatcher
        self._moves = moves
        self._parts: Sequence[Part] = ()

    def place(
        self,
        unfinished: Unfinished,
        sizes: Sequence[int],
        *,
        held: HeldTicket | None,
        may_wait: bool,
        on_end: Callable[[], Awaitable[None]],
    ) -> None:
        """Gives every part to a worker. `may_wait`: see `Part.start`. `on_end`: awaited before the reader gets the end
        of the group."""
        self._parts = parts = self._split(unfinished, sizes, held=held)
        for _ in range(len(sizes) - len(parts)):
            if held is not None:
                held.release()
        for part in parts:
            part.start(may_wait=may_wait)
        if len(parts) == 1:
            parts[0].on_end = on_end
            self.stream = parts[0]
        else:
            self.stream = merge = Merge[GroupDelta](DELTAS_PER_PART * len(parts), on_end=on_end)
            for part in parts:
                merge.add(partial(deliver, part))

    async def stop(self, index: int) -> None:
        """Ends one choice early."""
        for part in self._parts:
            if index in part.unfinished.choices:
                await part.stop(index)

    async def abort(self) -> None:
        """Ends all choices where they are. The reader gets what has been generated, and the end of each choice."""
        for part in self._parts:
            await part.abort()

    def abandon(self) -> None:
        """Ends all waits for a worker, because the server is closing."""
        for part in self._parts:
            part.abandon()

    async def aclose(self) -> None:
        """Closes all parts, which frees their choices, tickets and tasks."""
        try:
            if isinstance(self.stream, Merge):
                await self.stream.aclose()
            closing = [part.aclose() for part in self._parts]
            await (closing[0] if len(closing) == 1 else asyncio.gather(*closing))
        finally:
            if isinstance(self.stream, Part):
                self.stream.on_end = None  # breaks a reference cycle, which only a full garbage collection would free

    def _split(self, unfinished: Unfinished, sizes: Sequence[int], *, held: HeldTicket | None) -> Sequence[Part]:
        """Returns one part for each size, until no choices are left. A single part has the group's id."""
        make = partial(Part, dispatcher=self._dispatcher, held=held)
        if len(sizes) == 1:
            return [make(unfinished, moves=self._moves())]
        request, id = unfinished.request, unfinished.request.request_id
        left = iter(unfinished.remaining_request(0).choices)
        parts = []
        for number, size in enumerate(sizes):
            if choices := tuple(islice(left, size)):
                part = msgspec.structs.replace(request, request_id=RequestId(f"{id}/{number}"), choices=choices)
                of_part = Unfinished(part, reader_id=id, prompt=unfinished.prompt)
                parts.append(make(of_part, moves=self._moves()))
        return parts
