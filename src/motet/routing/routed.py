"""Several workers of one role as one engine.

    prefill       the worker with the fewest prompt tokens waiting; if it dies, or takes no more, the next one in the
                  same call; one that died is tried again after a second
    generate      the worker with the fewest open choices; a group stays where it is. One that died is passed over
                  until it gives a sign of life
    release       the worker whose lease it is, else any: an engine reaches the others' leases through the side channel
    stop_choice   where the group is

Closing it closes the workers.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from motet.engines.base import GroupStream, Worker
from motet.errors import EngineClosedError, EngineDiedError, MotetError, OverloadedError
from motet.ids import RequestId
from motet.routing.choose import Candidate, Work, choose
from motet.routing.load import Load, Reading, WorkerLoad
from motet.routing.totals import total_stats
from motet.transfer.ticket import Ticket
from motet.types import EngineInfo, EngineStats, GenerateRequest, GroupDelta

COOLDOWN_S = 1.0
MIXED = "mixed"
"""The fingerprint of workers that differ: nothing is promised of what two of them write."""


class Routed:
    """An `Engine` over at least one worker."""

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        clock: Callable[[], float] = time.monotonic,
        cooldown_s: float = COOLDOWN_S,
    ) -> None:
        self._loads = [WorkerLoad(worker, clock=clock) for worker in workers]
        self._cooldown_s = cooldown_s
        self._groups: dict[RequestId, RoutedGroup] = {}

    @property
    def info(self) -> EngineInfo:
        """The only worker's; of several, what holds for any group on any of them."""
        return common_info([load.worker.engine.info for load in self._loads])

    def generate(self, request: GenerateRequest) -> "RoutedGroup":
        load = self._chosen(Work.GENERATE)
        group = RoutedGroup(load, request, died=self._died, ended=self._ended)
        self._groups[request.request_id] = group
        return group

    async def prefill(self, request: GenerateRequest, *, readers: int = 1) -> Ticket:
        failures: list[MotetError] = []
        tried: list[WorkerLoad] = []
        while (load := self._next(Work.PREFILL, besides=tried)) is not None:
            tried.append(load)
            try:
                return await self._prefill(load, request, readers=readers)
            except EngineDiedError as error:
                self._died(load)
                failures.append(error)
            except OverloadedError as error:
                failures.append(error)
        full = [error for error in failures if isinstance(error, OverloadedError)]
        raise (full or failures or [self._all_down()])[-1]

    async def release(self, ticket: Ticket) -> None:
        owners = [load for load in self._loads if _owns(load.worker, ticket)]
        await (owners or [self._chosen(Work.GENERATE)])[0].worker.engine.release(ticket)

    def cached_tokens(self, request: GenerateRequest) -> int:
        """On the worker that `generate` would choose."""
        return self._chosen(Work.GENERATE).worker.engine.cached_tokens(request)

    async def stop_choice(self, request_id: RequestId, index: int) -> None:
        if group := self._groups.get(request_id):
            await group.stop(index)

    async def stats(self) -> EngineStats:
        """Of all that answer. EngineDiedError if none does."""
        answers = await asyncio.gather(*(self._stats_if_alive(load) for load in self._loads))
        alive = [stats for stats in answers if stats is not None]
        if not alive:
            raise self._all_down()
        return total_stats(alive)

    async def close(self) -> None:
        await asyncio.gather(*(load.worker.engine.close() for load in self._loads))

    def prefill_load(self, request: GenerateRequest) -> Load:
        return self._chosen(Work.PREFILL).load(request)

    def generate_load(self, request: GenerateRequest) -> Load:
        return self._chosen(Work.GENERATE).load(request)

    def check(self) -> None:
        """Raises unless every group has ended and the books are empty."""
        if self._groups:
            raise AssertionError(f"groups left open: {sorted(self._groups)}")
        for load in self._loads:
            load.check()

    async def _prefill(self, load: WorkerLoad, request: GenerateRequest, *, readers: int) -> Ticket:
        reading = load.give(load.uncached(request))
        try:
            ticket = await load.worker.engine.prefill(request, readers=readers)
        except BaseException:
            load.drop(reading)
            raise
        load.done(reading, computed_tokens=ticket.num_tokens - ticket.cached_tokens)
        return ticket

    def _chosen(self, work: Work) -> WorkerLoad:
        """If all are down, the first: it says itself what is wrong, if anything still is."""
        return self._next(work) or self._loads[0]

    def _next(self, work: Work, *, besides: Sequence[WorkerLoad] = ()) -> WorkerLoad | None:
        loads = [load for load in self._loads if load not in besides]
        place = choose([_candidate(load) for load in loads], work)
        return None if place is None else loads[place]

    async def _stats_if_alive(self, load: WorkerLoad) -> EngineStats | None:
        try:
            stats = await load.worker.engine.stats()
        except (EngineDiedError, EngineClosedError):
            self._died(load)
            return None
        load.answered()
        return stats

    def _died(self, load: WorkerLoad) -> None:
        load.died(cooldown_s=self._cooldown_s)

    def _ended(self, request_id: RequestId) -> None:
        self._groups.pop(request_id, None)

    def _all_down(self) -> EngineDiedError:
        return EngineDiedError(f"no worker is up: {', '.join(load.worker.id for load in self._loads)}")


class RoutedGroup:
    """The stream of one group on the worker it was given to; keeps that worker's books."""

    def __init__(
        self,
        load: WorkerLoad,
        request: GenerateRequest,
        *,
        died: Callable[[WorkerLoad], None],
        ended: Callable[[RequestId], None],
    ) -> None:
        self._load = load
        self._request = request
        self._died = died
        self._ended = ended
        self._stream: GroupStream = load.worker.engine.generate(request)
        self._unfinished = {start.index for start in request.choices}
        load.open_choices += len(self._unfinished)
        self._reading: Reading | None = load.give(0 if request.ticket else load.uncached(request))

    def __aiter__(self) -> "RoutedGroup":
        return self

    async def __anext__(self) -> GroupDelta:
        try:
            delta = await anext(self._stream)
        except (StopAsyncIteration, MotetError) as end:
            if isinstance(end, EngineDiedError):
                self._died(self._load)
            self._close_books()
            raise
        self._prompt_read(delta)
        self._finished(choice.index for choice in delta.choices if choice.finish)
        return delta

    async def aclose(self) -> None:
        self._close_books()
        await self._stream.aclose()

    async def stop(self, index: int) -> None:
        await self._load.worker.engine.stop_choice(self._request.request_id, index)
        self._finished([index])

    def _prompt_read(self, delta: GroupDelta) -> None:
        """The first delta of a group says that its prompt has been computed, or fetched."""
        if self._reading is None:
            return
        cached_tokens = delta.prompt.cached_tokens if delta.prompt else 0
        computed_tokens = 0 if self._request.ticket else len(self._request.prompt) - cached_tokens
        self._load.done(self._reading, computed_tokens=computed_tokens)
        self._reading = None

    def _finished(self, indices: Iterable[int]) -> None:
        for index in indices:
            if index in self._unfinished:
                self._unfinished.remove(index)
                self._load.open_choices -= 1
        if not self._unfinished:
            self._close_books()

    def _close_books(self) -> None:
        """Nothing more comes of this group. Twice changes nothing."""
        self._load.open_choices -= len(self._unfinished)
        self._unfinished.clear()
        if self._reading is not None:
            self._load.drop(self._reading)
            self._reading = None
        self._ended(self._request.request_id)


def common_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """What holds for any group on any of these workers. A group lives on one of them: the smallest room counts."""
    first = infos[0]
    if len(infos) == 1:
        return first
    return msgspec.structs.replace(
        first,
        max_model_len=min(info.max_model_len for info in infos),
        num_blocks=min(info.num_blocks for info in infos),
        max_num_seqs=min(info.max_num_seqs for info in infos),
        fingerprint=first.fingerprint if len({info.fingerprint for info in infos}) == 1 else MIXED,
        pid=None,
        transfer=None,
    )


def _owns(worker: Worker, ticket: Ticket) -> bool:
    address = worker.engine.info.transfer
    return address is not None and address.engine_id == ticket.remote_engine_id


def _candidate(load: WorkerLoad) -> Candidate:
    return Candidate(
        up=load.up,
        may_be_tried=load.may_be_tried,
        waiting_tokens=load.waiting_tokens,
        open_choices=load.open_choices,
    )
