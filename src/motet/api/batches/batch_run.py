"""One batch from its present state to its end, or until the server closes (`runner`)."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
from starlette.types import ASGIApp

from motet.api.batches.folder import BatchFolder, output_record
from motet.api.batches.input_lines import InputCheck, InputPiece, Place, id_digest, read_piece
from motet.api.batches.line_calls import MAX_ANSWER_BYTES, LineAnswer, call_line
from motet.api.batches.records import BatchProblem, BatchStatus, BatchTokens, LineCounts, reached
from motet.api.batches.results import ScannedPiece, last_bytes, result_pieces, scan, tokens_in
from motet.api.batches.store import BatchStore, OpenBatch
from motet.api.batches.turns import LineTurns, first_unless
from motet.api.http.failure import error_json
from motet.batch.line_file import LineFile
from motet.batch.lines import BatchLine, LineError, error_line
from motet.engines.refusals import ReplyVerdict, growing_pauses
from motet.errors import RequestError, UnauthorizedError
from motet.metrics.batch_figures import LineOutcome

log = logging.getLogger(__name__)

FIRST_RETRY_S, MAX_RETRY_S = 0.5, 30.0
"""Time in seconds before a line runs again that was refused because of load. It doubles each time."""
MAX_LOSSES = 3
"""Maximum number of times that a line runs whose worker is lost. Other refusals are repeated until the expiry."""
SYNC_INTERVAL_S = 1.0
"""Time in seconds after which an appended line is made durable."""
NO_KEY = "The API key that created this batch is not a key of this server any more."
EXPIRED = "This request could not be executed before the completion window expired."
NO_TOKENS = BatchTokens()
NO_ANSWER = "The server did not complete the answer to this request."
TOO_LARGE = f"The answer has more than {MAX_ANSWER_BYTES} bytes, the maximum in a batch. Ask for less in one line."


class BatchRun:
    """Runs one batch: validates it, runs its lines, and stores its results."""

    def __init__(
        self,
        batch: OpenBatch,
        store: BatchStore,
        *,
        app: ASGIApp,
        turns: LineTurns,
        key: str | None,
        max_body_bytes: int,
        closing: Callable[[], bool],
        retry_s: float = FIRST_RETRY_S,
    ) -> None:
        """`key`: the API key that created the batch, empty if requests need none; None if the server lacks the key.
        `closing`: returns True if the server closes, and the batch must stay as it is."""
        self._batch = batch
        self._store = store
        self._app = app
        self._turns = turns
        self._key = key
        self._max_body_bytes = max_body_bytes
        self._closing = closing
        self._retry_s = retry_s
        self._done: set[bytes] = set()
        """`id_digest` of each line that has a result."""
        self._files: dict[bool, LineFile] = {}
        """The error file (True) and the output file (False)."""
        self._failure: Exception | None = None
        """The error with which a result could not be stored."""

    async def run(self) -> None:
        if self._batch.record.status is BatchStatus.CANCELLING:
            self._batch.stop.set()
        try:
            if self._batch.record.status is BatchStatus.VALIDATING:
                await self._validate()
            if self._batch.record.ended or self._closing():
                return
            await self._open_files()
            syncing = asyncio.create_task(self._sync_at_intervals())
            try:
                await self._run_lines()
            finally:
                syncing.cancel()
                await asyncio.wait([syncing])
            if self._failure is not None:
                raise self._failure
            if not self._closing():
                await self._end()
        except (RequestError, OSError) as error:
            await self._fail(error)
        finally:
            await self._close_files()

    async def _validate(self) -> None:
        """Checks all lines. The batch fails if one is invalid."""
        check, place = InputCheck(max_lines=self._store.config.batch_max_lines), Place()
        while not self._batch.stop.is_set():
            piece = await self._read(place, check)
            if check.complete or piece.next is None:
                break
            place = piece.next
        else:
            return
        record = msgspec.structs.replace(self._batch.record, model=check.model, problems=tuple(check.problems))
        if check.problems:
            await self._store.change(self._batch, reached(record, BatchStatus.FAILED, now_s=self._store.clock()))
            return
        record = msgspec.structs.replace(record, counts=LineCounts(check.total))
        if record.status is BatchStatus.VALIDATING:  # else it was cancelled
            record = reached(record, BatchStatus.IN_PROGRESS, now_s=self._store.clock())
        await self._store.change(self._batch, record)

    async def _read(self, place: Place, check: InputCheck | None = None) -> InputPiece:
        """Returns the next lines of the input file. `check`: gets them too."""
        record = self._batch.record

        def read(folder: BatchFolder) -> InputPiece:
            path = folder.path(record.input_id)
            piece = read_piece(path, place, endpoint=record.endpoint, max_body_bytes=self._max_body_bytes)
            if check is not None:
                check.add(piece)
            return piece

        return await self._store.call(read)

    async def _open_files(self) -> None:
        """Opens the files of results, and finds the lines that they have."""
        record, lengths = self._batch.record, {False: 0, True: 0}
        tokens = BatchTokens()

        def open_files(folder: BatchFolder) -> None:
            for errors, id in ((False, record.output_id), (True, record.error_id)):
                self._files[errors] = folder.open_results(id)

        await self._store.call(open_files)
        for errors, file in self._files.items():
            num_bytes = file.num_bytes
            place: int | None = 0
            while place is not None:
                piece = await self._scan(file, place)
                self._done.update(piece.ids)
                lengths[errors] += len(piece.ids)
                tokens, place = tokens.plus(piece.tokens), piece.next
            self._store.usage.grow(record.owner, file.num_bytes - num_bytes)
        counts = LineCounts(record.counts.total, lengths[False], lengths[True])
        self._batch.record = msgspec.structs.replace(self._batch.record, counts=counts, tokens=tokens)

    async def _scan(self, file: LineFile, start: int) -> ScannedPiece:
        return await self._store.call(lambda _: scan(file, start))

    async def _run_lines(self) -> None:
        """Runs all lines without a result. Returns when no line runs any more."""
        stop, place = self._batch.stop, Place()
        free = asyncio.Semaphore(self._store.config.batch_concurrency)
        async with asyncio.TaskGroup() as tasks:
            while not stop.is_set():
                piece = await self._read(place)
                for line in self._missing(piece):
                    if not await self._hold(line, free):
                        return
                    tasks.create_task(self._run_line(line, free))
                if piece.next is None:
                    return
                place = piece.next

    async def _hold(self, line: BatchLine, free: asyncio.Semaphore) -> bool:
        """Waits until the line can wait for a slot. Returns False if the batch stops before."""
        stop, owner, size = self._batch.stop, self._batch.record.owner, len(line.body)
        if not await first_unless(stop, free.acquire()):
            return False
        if await first_unless(stop, self._turns.memory.take(owner, size)):
            return True
        free.release()
        return False

    def _missing(self, piece: InputPiece) -> list[BatchLine]:
        return [
            line
            for _, line in piece.lines
            if isinstance(line, BatchLine) and id_digest(line.custom_id) not in self._done
        ]

    async def _run_line(self, line: BatchLine, free: asyncio.Semaphore) -> None:
        try:
            if (answer := await self._answer(line)) is not None:
                await self._store_answer(line, answer)
        except (RequestError, OSError) as error:
            self._stop_after(error)
        finally:
            self._turns.memory.free(self._batch.record.owner, len(line.body))
            free.release()

    async def _answer(self, line: BatchLine) -> LineAnswer | None:
        """Returns the answer to a line; None if the batch stops before."""
        if self._key is None:
            return LineAnswer(UnauthorizedError.status, pieces=[error_json(UnauthorizedError(NO_KEY))], complete=True)
        stop, pauses, losses = self._batch.stop, growing_pauses(self._retry_s, longest_s=MAX_RETRY_S), 0
        while await first_unless(stop, self._turns.take(self._batch.record.owner)):
            figures = self._store.figures
            figures.running_lines += 1
            try:
                answer = await call_line(self._app, line, key=self._key, stop=stop)
            finally:
                figures.running_lines -= 1
                self._turns.free()
            verdict = answer.verdict
            if stop.is_set() and not verdict.is_final:  # the server closes
                return None
            losses += verdict is ReplyVerdict.BROKEN
            if verdict.is_final or losses >= MAX_LOSSES:
                return answer if answer.complete or not stop.is_set() else None
            figures.retries += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), next(pauses))
        return None

    async def _store_answer(self, line: BatchLine, answer: LineAnswer) -> None:
        """Appends the result of a line. Raises RequestError if the owner may not store more, and OSError."""
        errors = answer.too_large or not (answer.complete and answer.verdict is ReplyVerdict.COMPLETED)

        def written(_: BatchFolder) -> tuple[Sequence[bytes], BatchTokens]:
            if answer.complete and not answer.too_large:
                return result_pieces(line, answer), tokens_in(last_bytes(answer.pieces))
            code, why = ("answer_too_large", TOO_LARGE) if answer.too_large else ("no_response", NO_ANSWER)
            return [error_line(LineError(code, why, None, line.custom_id), line_id=line.id)], NO_TOKENS

        made, tokens = await self._store.call(written)
        await self._append(made, errors=errors)
        self._store.figures.lines[LineOutcome.FAILED if errors else LineOutcome.COMPLETED] += 1
        self._done.add(id_digest(line.custom_id))
        record = self._batch.record
        counts = LineCounts(
            record.counts.total, record.counts.completed + (not errors), record.counts.failed + int(errors)
        )
        self._batch.record = msgspec.structs.replace(record, counts=counts, tokens=record.tokens.plus(tokens))

    async def _append(self, lines: Sequence[bytes], *, errors: bool) -> None:
        """`lines`: the bytes of complete lines, in pieces."""
        owner, file, num_bytes = self._batch.record.owner, self._files[errors], sum(map(len, lines))
        self._store.usage.grow(owner, num_bytes)
        try:
            await self._store.call(lambda _: file.append(*lines))
        except BaseException:
            self._store.usage.grow(owner, -num_bytes)
            raise

    async def _end(self) -> None:
        """Ends the batch, whose lines have run unless it was cancelled or has expired."""
        record, now_s = self._batch.record, self._store.clock()
        if record.status is BatchStatus.CANCELLING:
            status = BatchStatus.CANCELLED
        elif self._batch.stop.is_set() and now_s >= record.expires_s:
            status = BatchStatus.EXPIRED
            await self._add_expired_lines()
        else:
            status = BatchStatus.COMPLETED
            await self._store.change(self._batch, reached(record, BatchStatus.FINALIZING, now_s=now_s))
        await self._end_with(status)

    async def _add_expired_lines(self) -> None:
        """Adds an error for each line without a result."""
        place: Place | None = Place()
        while place is not None:
            piece = await self._read(place)
            missing = self._missing(piece)
            lines = [
                error_line(LineError("batch_expired", EXPIRED, None, line.custom_id), line_id=line.id)
                for line in missing
            ]
            await self._append(lines, errors=True)
            self._store.figures.lines[LineOutcome.EXPIRED] += len(missing)
            self._done.update(id_digest(line.custom_id) for line in missing)
            counts = self._batch.record.counts
            counts = LineCounts(counts.total, counts.completed, counts.failed + len(missing))
            self._batch.record = msgspec.structs.replace(self._batch.record, counts=counts)
            place = piece.next

    async def _fail(self, error: RequestError | OSError) -> None:
        """Ends the batch with an error of the storage. Its results so far stay available."""
        if isinstance(error, OSError):
            log.error("a batch failed: %s", error, extra={"fields": {"batch": self._batch.record.id}})
            problem = BatchProblem(code="storage_error", message="The server could not read or write a file.")
        else:
            problem = BatchProblem(code=error.code or "invalid_value", message=error.message)
        self._batch.record = msgspec.structs.replace(self._batch.record, problems=(problem,))
        await self._end_with(BatchStatus.FAILED)

    async def _end_with(self, status: BatchStatus) -> None:
        await self._close_files()
        now_s = self._store.clock()
        sizes = {errors: file.num_bytes for errors, file in self._files.items()}
        record = msgspec.structs.replace(
            self._batch.record, has_output=bool(sizes.get(False)), has_errors=bool(sizes.get(True))
        )
        files = [
            output_record(record, errors=errors, num_bytes=size, now_s=now_s, keep_s=self._store.keep_s)
            for errors, size in sizes.items()
            if size
        ]
        await self._store.change(self._batch, reached(record, status, now_s=now_s), *files)

    async def _close_files(self) -> None:
        def close(_: BatchFolder) -> None:
            for file in self._files.values():
                try:
                    file.sync()
                finally:
                    file.close(keep_empty=False)

        await self._store.call(close)

    async def _sync_at_intervals(self) -> None:
        """Makes the lines of the files durable, until the task is cancelled."""

        def sync(_: BatchFolder) -> None:
            for file in self._files.values():
                file.sync()

        try:
            while True:
                await asyncio.sleep(SYNC_INTERVAL_S)
                await self._store.call(sync)
        except OSError as error:
            self._stop_after(error)

    def _stop_after(self, error: RequestError | OSError) -> None:
        """Ends the batch, since results cannot be stored."""
        self._failure = error
        self._batch.stop.set()
