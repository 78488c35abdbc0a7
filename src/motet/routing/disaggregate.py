"""Prefill and decode apart: one prefill, one ticket, one transfer a group, whatever n is.

1. A group that prefill would not pay for, or cannot help with, goes straight to decode (`bypass`).
2. For any other one prefill call is made, bounded in time. It brings a ticket.
3. Decode gets the group with the ticket, fetches the KV once, and writes all choices.
4. Where prefill fails, decode computes the prompt itself: the client sees nothing of it but a later first token.

The same class serves a whole cell and a decode server that asks prefill servers and streams straight to its clients.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping

import msgspec

from motet.errors import EngineClosedError
from motet.ids import RequestId
from motet.routing.bypass import BypassReason, BypassRules, Facts, bypass_reason
from motet.routing.load import Loaded
from motet.routing.two_phases import TwoPhaseGroup
from motet.transfer.ticket import Ticket
from motet.types import EngineInfo, EngineStats, GenerateRequest, Role


class Disaggregated:
    """An `Engine` of two. To the world it is the decode side, which can do everything by itself; with role BOTH, a cell
    that takes no tickets and hands none out. Closing it closes both sides."""

    def __init__(self, prefill: Loaded, decode: Loaded, rules: BypassRules, *, role: Role = Role.BOTH) -> None:
        self._prefill = prefill
        self._decode = decode
        self._rules = rules
        self._role = role
        self._groups: dict[RequestId, TwoPhaseGroup] = {}
        self._bypasses = Counter[str]({reason.value: 0 for reason in BypassReason})

    @property
    def info(self) -> EngineInfo:
        info = self._decode.info
        return info if self._role is info.role else msgspec.structs.replace(info, role=self._role, transfer=None)

    @property
    def bypasses(self) -> Mapping[str, int]:
        """How many groups were not prefilled by a prefill worker, by reason; all reasons are there."""
        return dict(self._bypasses)

    def generate(self, request: GenerateRequest) -> TwoPhaseGroup:
        group = TwoPhaseGroup(request, self._prefill, self._decode, bypassed=self._bypassed, ended=self._ended)
        if request.ticket is None and self._asks_prefill(request):
            group.start_with_prefill(timeout_s=self._rules.prefill_timeout_s)
        else:
            group.start()
        self._groups[request.request_id] = group
        return group

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        return await self._prefill.prefill(request, readers=readers)

    async def release(self, ticket: Ticket) -> None:
        await self._prefill.release(ticket)

    def cached_tokens(self, request: GenerateRequest) -> int:
        return self._decode.cached_tokens(request)

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        if group := self._groups.get(request_id):
            await group.stop(index)

    async def stats(self) -> EngineStats:
        """The decode side's."""
        return await self._decode.stats()

    async def close(self) -> None:
        closed = EngineClosedError("the engine was closed")
        await asyncio.gather(*(group.fail(closed) for group in list(self._groups.values())))
        await asyncio.gather(self._prefill.close(), self._decode.close())

    def check(self) -> None:
        """Raises unless every group has ended."""
        if self._groups:
            raise AssertionError(f"groups left open: {sorted(self._groups)}")

    def _asks_prefill(self, request: GenerateRequest) -> bool:
        facts = Facts(
            prompt_tokens=len(request.prompt),
            prompt_logprobs=request.sampling.prompt_logprobs is not None,
            prefill=self._prefill.prefill_load(request),
            decode=self._decode.generate_load(request),
        )
        reason = bypass_reason(facts, self._rules)
        if reason is not None:
            self._bypassed(reason)
        return reason is None

    def _bypassed(self, reason: BypassReason) -> None:
        self._bypasses[reason.value] += 1

    def _ended(self, group: TwoPhaseGroup) -> None:
        if self._groups.get(group.request.request_id) is group:
            del self._groups[group.request.request_id]
