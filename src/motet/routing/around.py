"""What every engine around another one does alike: keep its own groups by name, and pass on all it has no part in."""

from typing import Generic, Protocol, TypeVar

from motet.engines.base import Engine
from motet.ids import RequestId
from motet.transfer.ticket import Ticket
from motet.types import EngineInfo, EngineStats, GenerateRequest


class OwnGroup(Protocol):
    """A group while it is in the books."""

    @property
    def request(self) -> GenerateRequest: ...

    async def stop(self, index: int) -> None:
        """Ends one choice early."""
        ...


Own = TypeVar("Own", bound=OwnGroup)


class Around(Generic[Own]):
    """An `Engine` but for `generate` and `close`, which are what makes each of them another one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._groups: dict[RequestId, Own] = {}

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        return await self._engine.prefill(request, readers=readers)

    async def release(self, ticket: Ticket) -> None:
        await self._engine.release(ticket)

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        if group := self._groups.get(request_id):
            await group.stop(index)
        else:
            await self._engine.stop_choice(request_id, index)

    async def stats(self) -> EngineStats:
        return await self._engine.stats()

    def check(self) -> None:
        """Raises unless every group has ended."""
        if self._groups:
            raise AssertionError(f"groups left open: {sorted(self._groups)}")

    def _keep(self, group: Own) -> Own:
        self._groups[group.request.request_id] = group
        return group

    def _ended(self, group: Own) -> None:
        """For the group to call. Another one of its name may have taken its place."""
        if self._groups.get(group.request.request_id) is group:
            del self._groups[group.request.request_id]
