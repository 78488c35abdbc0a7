"""The files and batches of a server, for its event loop. Everything that blocks runs in the store's only thread."""

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar

from motet.api.batches.folder import BatchFolder, close_durable
from motet.api.batches.records import BatchRecord, BatchStatus, FilePurpose, FileRecord, new_file_id, reached
from motet.api.batches.usage import StorageUsage
from motet.api.http.failure import invalid_value
from motet.errors import BodyTooLargeError, NotFoundError, RequestError
from motet.metrics.batch_figures import BatchFigures
from motet.settings.batch_config import DAY_S, BatchConfig

log = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")
BUFFER_BYTES = 256 * 1024
"""Number of bytes that are written to a file, or read from it, at a time."""
FLAG_OFF = "This server has no files and batches: start it with --batch-dir FOLDER."


def uninterrupted(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Makes a coroutine function run to its end if its caller is cancelled, so that what it has done in the folder is
    also counted. The caller is cancelled after it."""

    @functools.wraps(method)
    async def run(*args: P.args, **named: P.kwargs) -> T:
        running = asyncio.create_task(method(*args, **named))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.gather(running, return_exceptions=True)
            raise

    return run


@dataclass(eq=False)
class OpenBatch:
    """A batch that has not ended. It is changed only in the event loop (`BatchStore.change`)."""

    record: BatchRecord
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when no more lines may run: the batch is cancelled or has expired, or the server closes."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the batch has ended, and clients can see its results."""


class BatchStore:
    """The folder of `--batch-dir`, with its limits. `opened` makes it."""

    def __init__(self, config: BatchConfig, *, clock: Callable[[], float] = time.time) -> None:
        self.config = config
        self.clock = clock
        self.usage = StorageUsage(config)
        self.figures = BatchFigures()
        self.open: dict[str, OpenBatch] = {}
        """All unfinished batches, by id, in the order in which they were created."""
        self.on_created: Callable[[OpenBatch], None] = lambda batch: None
        """Called with each new batch. Set by the runner."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch-folder")
        self._closed = False
        self._folder: BatchFolder

    @property
    def keep_s(self) -> int:
        return self.config.batch_keep_days * DAY_S

    def figures_now(self) -> BatchFigures:
        """Returns the metrics of all batches."""
        return replace(self.figures, unfinished=len(self.open), stored_bytes=self.usage.total_bytes)

    async def start(self) -> None:
        """Opens the folder. Raises ConfigError."""
        try:
            self._folder = await self._run(lambda: BatchFolder(Path(str(self.config.batch_dir)).expanduser()))
        except BaseException:
            self._thread.shutdown()
            raise
        self.usage.count(await self.call(lambda folder: folder.usage()))
        self.open = {
            record.id: OpenBatch(record) for record in await self.call(lambda folder: folder.batches.unfinished())
        }
        await self.remove_expired()

    async def close(self) -> None:
        await self.call(lambda folder: folder.close())
        self._thread.shutdown()
        self._closed = True

    async def call(self, work: Callable[[BatchFolder], T]) -> T:
        """Runs work on the folder in the store's thread, after all earlier work. After `close` it runs in this thread:
        uploads of clients that leave while the server ends are dropped then."""
        return work(self._folder) if self._closed else await self._run(lambda: work(self._folder))

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # Files

    async def file(self, id: str, *, owner: str) -> FileRecord:
        """Returns an owner's file. Raises NotFoundError, also for the file of another owner."""
        now_s = self.clock()
        if (found := await self.call(lambda folder: folder.files.find(id, owner=owner, now_s=now_s))) is None:
            raise _no_file(id)
        return found

    @uninterrupted
    async def delete(self, file: FileRecord) -> None:
        """Deletes a file. Raises RequestError while a batch reads it."""

        def delete(folder: BatchFolder) -> bool:
            if folder.batches.is_read(file.id):
                raise RequestError(f"File {file.id} is read by a batch that has not ended.", code="file_in_use")
            return folder.delete_file(file.id)

        if await self.call(delete):
            self.usage.remove_stored(file.owner, id=file.id, num_bytes=file.num_bytes)

    @uninterrupted
    async def remove_expired(self) -> None:
        now_s = self.clock()
        expired = await self.call(lambda folder: folder.remove_expired(now_s, keep_s=self.keep_s))
        for id, owner, num_bytes in expired:
            self.usage.remove_stored(owner, id=id, num_bytes=num_bytes)

    # Batches

    @uninterrupted
    async def add(self, record: BatchRecord) -> OpenBatch:
        """Adds a new batch, which starts to run. Raises RequestError above the limits of unfinished batches and of
        files, since its results are files."""
        own = sum(batch.record.owner == record.owner for batch in self.open.values())
        if own >= self.config.batch_max_open:
            message = f"Your API key has {own} unfinished batches, the maximum of this server (--batch-max-open)."
            raise RequestError(message, code="too_many_batches")
        self.usage.check_num_files(record.owner, param="input_file_id")
        batch, now_s = OpenBatch(record), self.clock()
        self.open[record.id] = batch  # counts from now on
        added = False
        try:
            added = await self.call(lambda folder: folder.add_batch(record, now_s=now_s))
        finally:
            if not added:
                del self.open[record.id]
        if not added:
            why = f"there is no file {record.input_id[:100]!r} with the purpose 'batch'"
            raise invalid_value("input_file_id", why)
        self.on_created(batch)
        return batch

    async def batch(self, id: str, *, owner: str) -> BatchRecord:
        """Returns an owner's batch. Raises NotFoundError, also for the batch of another owner."""
        if (running := self.open.get(id)) is not None and running.record.owner == owner:
            return running.record
        if (found := await self.call(lambda folder: folder.batches.find(id, owner=owner))) is None:
            raise NotFoundError(f"No such Batch object: {id[:100]}", param="id", code="batch_not_found")
        return found

    async def batches(self, owner: str, *, after: str | None, limit: int) -> Sequence[BatchRecord]:
        found = await self.call(lambda folder: folder.batches.page(owner, after=after, limit=limit))
        if found is None:
            raise NotFoundError(f"No such Batch object: {str(after)[:100]}", param="after", code="batch_not_found")
        return [self.open[record.id].record if record.id in self.open else record for record in found]

    async def change(self, batch: OpenBatch, record: BatchRecord, *files: FileRecord) -> None:
        """Stores another state of an open batch, and the files that its owner can see from now on."""
        batch.record = record
        await self.call(lambda folder: folder.save_batch(record, *files))
        if record.ended:
            self.open.pop(record.id, None)
            for _ in files:
                self.usage.add_file(record.owner)
            batch.ended.set()

    @uninterrupted
    async def cancel(self, id: str, *, owner: str) -> BatchRecord:
        """Starts to cancel a batch. Raises NotFoundError, and RequestError for a batch whose lines have all run."""
        record = await self.batch(id, owner=owner)
        batch = self.open.get(id)
        if batch is None or batch.record.ended or batch.record.status is BatchStatus.FINALIZING:
            message = f"A batch with the status '{record.status}' cannot be cancelled."
            raise RequestError(message, code="batch_not_cancellable")
        if batch.record.status is not BatchStatus.CANCELLING:
            await self.change(batch, reached(batch.record, BatchStatus.CANCELLING, now_s=self.clock()))
            batch.stop.set()
        return batch.record


def _no_file(id: str) -> NotFoundError:
    return NotFoundError(f"No such File object: {id[:100]}", param="id", code="file_not_found")


@asynccontextmanager
async def batch_store(
    config: BatchConfig, *, clock: Callable[[], float] = time.time
) -> AsyncIterator[BatchStore | None]:
    """Opens the folder of a server's settings; None if they have none. Raises ConfigError."""
    if config.batch_dir is None:
        yield None
        return
    store = BatchStore(config, clock=clock)
    await store.start()
    try:
        yield store
    finally:
        await store.close()


class Download:
    """The content of a file that is sent. `close` must be called at the end, also if `open` failed."""

    def __init__(self, store: BatchStore, file: FileRecord) -> None:
        self._store = store
        self._file = file
        self._content: BinaryIO | None = None

    @uninterrupted
    async def open(self) -> None:
        """Opens the content. Raises NotFoundError if it was deleted, and RateLimitedError if the owner has too many
        downloads."""
        owner, id = self._file.owner, self._file.id
        self._store.usage.start_download(owner, id=id)
        try:
            self._content = await self._store.call(lambda folder: folder.path(id).open("rb"))
        except BaseException as error:
            self._store.usage.end_download(owner, id=id)
            if isinstance(error, FileNotFoundError):
                raise _no_file(id) from error
            raise

    async def read(self) -> bytes:
        """Returns the next bytes; empty at the end."""
        content = self._content
        assert content is not None  # it was opened
        return await self._store.call(lambda _: content.read(BUFFER_BYTES))

    def close(self) -> None:
        """Ends the download, which can outlive the store."""
        if (content := self._content) is not None:
            self._content = None
            content.close()
            self._store.usage.end_download(self._file.owner, id=self._file.id)


class Upload:
    """A file that is uploaded. `drop` must be called at the end; it does nothing after `commit`, or if `start`
    failed."""

    def __init__(self, store: BatchStore, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._id = new_file_id()
        self._content: BinaryIO | None = None
        self._buffer = bytearray()
        self._num_bytes = 0

    @uninterrupted
    async def start(self) -> None:
        """Opens the content. Raises RequestError above a limit."""
        self._store.usage.start_upload(self._owner)
        try:
            self._content = await self._store.call(lambda folder: folder.start_upload(self._id))
        except BaseException:
            self._store.usage.end_upload(self._owner, num_bytes=0, kept=False)
            raise

    async def write(self, piece: bytes) -> None:
        """Appends a piece. Raises BodyTooLargeError and RequestError above a limit."""
        maximum = self._store.config.batch_max_file_bytes
        if self._num_bytes + len(piece) > maximum:
            why = f"is larger than {maximum} bytes, the maximum of this server (--batch-max-file-bytes)"
            raise BodyTooLargeError(f"The file {why}.")
        self._store.usage.grow(self._owner, len(piece))
        self._num_bytes += len(piece)
        self._buffer += piece
        if len(self._buffer) >= BUFFER_BYTES:
            await self._flush()

    @uninterrupted
    async def commit(self, *, filename: str, keep_s: int) -> FileRecord:
        """Adds the file to the owner's files, and makes it durable. `keep_s`: time after which it expires."""
        await self._flush()
        content, now_s = self._content, self._store.clock()
        assert content is not None  # it was started
        record = FileRecord(
            id=self._id,
            owner=self._owner,
            num_bytes=self._num_bytes,
            created_s=int(now_s),
            expires_s=int(now_s) + keep_s,
            filename=filename,
            purpose=FilePurpose.BATCH,
        )

        def add(folder: BatchFolder) -> None:
            close_durable(content)
            folder.add_file(record)

        await self._store.call(add)
        self._content = None
        self._store.usage.end_upload(self._owner, num_bytes=self._num_bytes, kept=True)
        return record

    @uninterrupted
    async def drop(self) -> None:
        """Removes an upload that was not committed."""
        if (content := self._content) is None:
            return
        self._content = None
        self._store.usage.end_upload(self._owner, num_bytes=self._num_bytes, kept=False)

        def drop(folder: BatchFolder) -> None:
            content.close()
            folder.drop_upload(self._id)

        await self._store.call(drop)

    async def _flush(self) -> None:
        content, piece = self._content, bytes(self._buffer)
        self._buffer.clear()
        if content is not None and piece:
            await self._store.call(lambda folder: content.write(piece))
