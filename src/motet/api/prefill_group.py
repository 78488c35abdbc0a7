"""A group that is prefilled for another server: one step, one choice that ends without a token, and a ticket."""

from motet.engines.base import Engine
from motet.text.choice import ChoiceEvent
from motet.text.group import GroupEvents
from motet.text.usage import Usage
from motet.transfer.ticket import Ticket
from motet.types import FinishReason, GenerateRequest, PromptReport


class PrefillGroup:
    """Read as a `TextGroup` is. Cancelling the read frees everything; what comes after it is the ticket's holder's."""

    def __init__(self, engine: Engine, request: GenerateRequest, *, readers: int) -> None:
        self.ticket: Ticket | None = None
        self.worker = ""
        """Not told of a prefill."""
        self._engine = engine
        self._request = request
        self._readers = readers

    async def __anext__(self) -> GroupEvents:
        if self.ticket is not None:
            raise StopAsyncIteration
        self.ticket = await self._engine.prefill(self._request, readers=self._readers)
        (start,) = self._request.choices
        ended = ChoiceEvent(start.index, "", (), finish=FinishReason.LENGTH)
        return GroupEvents((ended,), PromptReport(self.ticket.cached_tokens))

    async def aclose(self) -> None:
        """There is nothing to end: a prefill lasts as long as it is waited for."""

    @property
    def usage(self) -> Usage:
        cached_tokens = self.ticket.cached_tokens if self.ticket else 0
        return Usage(prompt_tokens=len(self._request.prompt), completion_tokens=0, cached_tokens=cached_tokens)

    def usage_of(self, index: int) -> Usage:
        """Of the only choice."""
        return self.usage
