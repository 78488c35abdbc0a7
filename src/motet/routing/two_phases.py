"""One group between prefill and decode: the stream that `Disaggregated` hands out.

    ticket() ──► decode.generate(request with ticket, or without if there was none to be had) ──► deltas

Who frees what: from the moment prefill grants the ticket until the first delta, by which decode has read the KV or done
without it, the ticket is this stream's, and whatever ends the group gives it back; so it does at once with one that no
decode worker can read any more, and the group goes without. Decode tells the lease of one it was given too, if it still
can; giving back twice changes nothing.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from motet.engines.base import GroupStream
from motet.errors import MotetError
from motet.routing.load import Loaded
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest, GroupDelta


class Prefill(Protocol):
    """Where tickets come from."""

    async def ticket(self, request: GenerateRequest) -> Ticket | None:
        """None: decode is to do without. Raises what ends the group."""
        ...

    async def release(self, ticket: Ticket) -> None: ...


class TwoPhaseGroup:
    """A `GroupStream`. Two tasks are its own: the way to decode, and the end, which goes on if its caller is cancelled;
    `ended` is called when nothing of the group is left."""

    def __init__(
        self,
        request: GenerateRequest,
        prefill: "Prefill",
        decode: Loaded,
        *,
        ended: Callable[["TwoPhaseGroup"], None],
    ) -> None:
        self.request = request
        self._prefill = prefill
        self._decode = decode
        self._ended = ended
        self._choices = request.choices
        self._inner: GroupStream | None = None
        self._unread: Ticket | None = None
        self._releasing: asyncio.Task[None] | None = None
        self._error: MotetError | None = None
        self._submitting = asyncio.create_task(self._submit())
        self._ending: asyncio.Task[None] | None = None

    @property
    def choices_on_the_way(self) -> int:
        """Not given to decode yet."""
        return len(self._choices) if self._inner is None else 0

    def __aiter__(self) -> "TwoPhaseGroup":
        return self

    async def __anext__(self) -> GroupDelta:
        if self._inner is None:
            await self._submitted()
        if self._ending is not None or self._inner is None:
            await self.aclose()
            raise self._error or StopAsyncIteration
        try:
            delta = await anext(self._inner)
        except StopAsyncIteration:
            await self.aclose()
        except MotetError as error:
            await self.fail(self._error or error)
        else:
            self._unread = None
            return delta
        raise self._error or StopAsyncIteration

    async def aclose(self) -> None:
        if self._ending is None:
            self._submitting.cancel()
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def fail(self, error: MotetError) -> None:
        """Ends the group; its reader gets `error`."""
        self._error = error
        await self.aclose()

    async def stop(self, index: int) -> None:
        """Before decode has the group: the choice is left out of it."""
        if self._inner is not None:
            await self._decode.stop_choice(self.request.request_id, index)
            return
        self._choices = tuple(start for start in self._choices if start.index != index)
        if not self._choices:
            await self.aclose()

    async def _submitted(self) -> None:
        await asyncio.wait((self._submitting,))
        if not self._submitting.cancelled():
            self._submitting.result()

    async def _submit(self) -> None:
        try:
            self._unread = await self._prefill.ticket(self.request)
            if self._unread is not None and not self._decode.reads(self._unread, self.request.model):
                self._give_back()
            request = msgspec.structs.replace(self.request, ticket=self._unread, choices=self._choices)
            self._inner = self._decode.generate(request)
        except MotetError as error:
            self._error = error
            self._give_back()

    def _give_back(self) -> None:
        """Once; only the end waits for it."""
        if self._unread is not None:
            self._releasing = asyncio.create_task(self._prefill.release(self._unread))
            self._unread = None

    async def _end(self) -> None:
        try:
            await asyncio.wait((self._submitting,))
            if self._inner is not None:
                await self._inner.aclose()
            self._give_back()
            if self._releasing is not None:
                await self._releasing
        finally:
            self._ended(self)
