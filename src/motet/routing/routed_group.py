"""One group on the worker it was given to: its stream, and the books of that worker."""

from collections.abc import Callable

import msgspec

from motet.engines.base import GroupStream, Worker
from motet.errors import EngineDiedError, MotetError, OverloadedError
from motet.routing.fleet import Member
from motet.routing.load import Reading, WorkerLoad
from motet.types import GenerateRequest, GroupDelta


class RoutedGroup:
    """A `GroupStream`. Whatever ends the group closes the books; `failed` and `ended` are called once at most."""

    def __init__(  # sizes: the group, its worker, and what each is told at the end
        self,
        member: Member,
        worker: Worker,
        request: GenerateRequest,
        *,
        uncached_tokens: int,
        failed: Callable[[Member, Worker, MotetError], None],
        ended: Callable[["RoutedGroup"], None],
        freed: Callable[[], None],
    ) -> None:
        """`uncached_tokens`: prompt tokens to be computed there. `freed`: called when choices have ended."""
        self.request = request
        self.member = member
        self._worker = worker
        engine = worker.engine
        self._failed = failed
        self._ended = ended
        self._freed = freed
        self._open = True
        self._evicted: MotetError | None = None
        if request.straight:
            request = msgspec.structs.replace(request, straight=False)
        self._stream: GroupStream = engine.generate(request)
        self._unfinished = {start.index for start in request.choices}
        self._block_size = engine.info.block_size
        self._books: WorkerLoad = member.books
        self._books.open_choices += len(self._unfinished)
        self._trunk_blocks = -(-len(request.prompt) // self._block_size)
        self._books.trunk_blocks += self._trunk_blocks
        # A choice holds a block before it has written anything, and one more every `block_size` tokens.
        self._steps = max(len(start.written) for start in request.choices)
        self._tail_blocks = 1 + self._steps // self._block_size
        self._books.tail_blocks += self._tail_blocks * len(self._unfinished)
        self._reading: Reading | None = self._books.give(0 if request.ticket else uncached_tokens)

    def __aiter__(self) -> "RoutedGroup":
        return self

    async def __anext__(self) -> GroupDelta:
        try:
            delta = await self._stream.__anext__()
        except (StopAsyncIteration, MotetError) as end:
            self._close_books()
            if self._evicted is not None and isinstance(end, StopAsyncIteration):
                raise self._evicted from None
            if isinstance(end, EngineDiedError | OverloadedError):
                self._failed(self.member, self._worker, end)
            raise
        self.member.stirred = True
        if self._reading is not None:
            delta = self._prompt_read(delta)
        self._steps += 1
        if self._steps % self._block_size == 0:
            self._tail_blocks += 1
            self._books.tail_blocks += len(self._unfinished)
        for choice in delta.choices:
            if choice.finish is not None:
                self._finished(choice.index)
        return delta

    async def aclose(self) -> None:
        self._close_books()
        await self._stream.aclose()

    async def stop(self, index: int) -> None:
        await self._worker.engine.stop_choice(self.request.request_id, index)
        self._finished(index)

    async def evict(self, error: MotetError) -> None:
        """Ends the group here; its reader gets `error`, unless all its choices have finished."""
        if self._open and self._evicted is None:
            self._evicted = error
            await self._stream.aclose()

    def _prompt_read(self, delta: GroupDelta) -> GroupDelta:
        """The first delta of a group says that its prompt has been computed, or fetched."""
        assert self._reading is not None  # what it is called for
        report = delta.prompt
        cached_tokens = report.cached_tokens if report else 0
        computed_tokens = 0 if self.request.ticket else len(self.request.prompt) - cached_tokens
        self._books.done(self._reading, computed_tokens=computed_tokens)
        self._reading = None
        if report is None:
            return delta
        return msgspec.structs.replace(delta, prompt=msgspec.structs.replace(report, worker=self.member.id))

    def _finished(self, index: int) -> None:
        if index in self._unfinished:
            self._unfinished.remove(index)
            self._books.open_choices -= 1
            self._books.tail_blocks -= self._tail_blocks
            self._freed()
        if not self._unfinished:
            self._close_books()

    def _close_books(self) -> None:
        """Nothing more comes of this group. Twice changes nothing."""
        if not self._open:
            return
        self._open = False
        books = self._books
        books.open_choices -= len(self._unfinished)
        books.tail_blocks -= self._tail_blocks * len(self._unfinished)
        books.trunk_blocks -= self._trunk_blocks
        self._unfinished.clear()
        if self._reading is not None:
            books.drop(self._reading)
            self._reading = None
        self._ended(self)
