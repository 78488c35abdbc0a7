"""Prefill and decode apart: one prefill, one ticket, one transfer a group, whatever n is.

1. A group that prefill would not pay for, or cannot help with, goes straight to decode (`bypass`).
2. For any other one prefill call is made, bounded in time. It brings a ticket.
3. Decode gets the group with the ticket, fetches the KV once, and writes all choices.
4. Where prefill fails, decode computes the prompt itself: the client sees nothing of it but a later first token.

The same class serves a whole cell and a decode server that asks prefill servers and streams straight to its clients.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

import msgspec

from motet.engines.base import GroupStream
from motet.errors import EngineClosedError, MotetError, RequestError
from motet.ids import ModelName, RequestId
from motet.routing.bypass import BypassReason, BypassRules, Facts, bypass_reason, reason_of
from motet.routing.load import Loaded
from motet.routing.two_phases import TwoPhaseGroup
from motet.transfer.ticket import Ticket
from motet.types import EngineInfo, EngineStats, GenerateRequest, Role

logger = logging.getLogger(__name__)


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

    def generate(self, request: GenerateRequest) -> GroupStream:
        """What does without prefill is decode's, stream and all. Raises NoWorkerError if decode has no worker."""
        if request.ticket is not None or request.straight or not self.asks_prefill(request):
            return self._decode.generate(request)
        group = TwoPhaseGroup(request, self, self._decode, ended=self._ended)
        self._groups[request.request_id] = group
        return group

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        return await self._prefill.prefill(request, readers=readers)

    async def ticket(self, request: GenerateRequest, *, readers: int = 1) -> Ticket | None:
        """None: prefill failed, which is counted and logged, and decode is to do it by itself.

        Raises RequestError, which is the client's."""
        timeout_s = self._rules.prefill_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._prefill.prefill(request, readers=readers)
        except RequestError:
            raise
        except TimeoutError:
            reason, why = BypassReason.PREFILL_LATE, f"no answer within {timeout_s:g} s"
        except MotetError as error:
            reason, why = reason_of(error), error.message
        fields = {"request_id": request.trace, "group": request.request_id, "reason": reason, "error": why}
        logger.warning("prefill failed; decode computes the prompt", extra={"fields": fields})
        self._bypassed(reason)
        return None

    async def release(self, ticket: Ticket) -> None:
        await self._prefill.release(ticket)

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        if group := self._groups.get(request_id):
            await group.stop(index)
        else:
            await self._decode.stop_choice(request_id, index)

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

    def choices_on_the_way(self, model: ModelName) -> int:
        """Of groups that are being prefilled: no decode worker has them in its books yet."""
        return sum(group.choices_on_the_way for group in self._groups.values() if group.request.model == model)

    def ticket_readers(self, model: ModelName) -> int:
        """How many readers a ticket may have."""
        return self._prefill.ticket_readers(model)

    def reads(self, ticket: Ticket, model: ModelName) -> bool:
        """Whether a decode worker is up that can fetch what the ticket is for."""
        return self._decode.reads(ticket, model)

    def asks_prefill(self, request: GenerateRequest) -> bool:
        """Whether this group is for prefill first; counted where it is not. Raises NoWorkerError if decode has none."""
        if not (self._rules.prefill_may_come or self._prefill.has_prefill(request.model)):
            self._decode.check_ready(request.model)
            return False
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
