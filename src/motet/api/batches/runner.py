"""Runs the batches of a server: one of each owner at a time, in the order in which they were created.

1. validating    every line is checked; a batch with an invalid line fails
2. in_progress   `results.scan` finds the lines that ran before a restart; all others run, each in a slot (`turns`)
3. finalizing    the files get their records, so that clients see them
4. an end        completed, failed, expired or cancelled

When the server closes, running lines are abandoned and the batch stays as it is: the next start continues with 2."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext

from starlette.types import ASGIApp

from motet.api.batches.batch_run import FIRST_RETRY_S, BatchRun
from motet.api.batches.records import ANONYMOUS_OWNER
from motet.api.batches.store import BatchStore, OpenBatch
from motet.api.batches.turns import LineTurns, first_unless
from motet.api.http.admission import Admission
from motet.api.http.gate import CLIENT
from motet.api.service import Service

log = logging.getLogger(__name__)
EXPIRY_S = 600.0
"""Time between two removals of expired files."""


class BatchRunner:
    """Runs batches while the context is entered."""

    def __init__(
        self,
        store: BatchStore,
        app: ASGIApp,
        *,
        admission: Admission,
        keys: Mapping[str, str],
        max_body_bytes: int,
        retry_s: float,
    ) -> None:
        """`keys`: the API key of each owner; the anonymous owner has an empty key if requests need none. `retry_s`:
        time before a line that was refused because of load runs again."""
        self._store = store
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._retry_s = retry_s
        self._turns = LineTurns(admission, maximum=store.config.batch_concurrency)
        self._owner_turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def __aenter__(self) -> "BatchRunner":
        self._give = asyncio.create_task(self._turns.give())
        self._expire = asyncio.create_task(self._remove_expired())
        self._store.on_created = self._start
        for batch in list(self._store.open.values()):
            self._start(batch)
        return self

    async def __aexit__(self, *error: object) -> None:
        """Abandons running lines, and returns when nothing uses the store any more."""
        self._closing = True
        self._store.on_created = lambda batch: None
        for batch in self._store.open.values():
            batch.stop.set()
        for task in (self._give, self._expire):
            task.cancel()
        await asyncio.wait([self._give, self._expire, *self._tasks])

    def _start(self, batch: OpenBatch) -> None:
        if self._closing:
            return
        task = asyncio.create_task(self._run(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, batch: OpenBatch) -> None:
        record = batch.record
        loop, left_s = asyncio.get_running_loop(), record.expires_s - self._store.clock()
        expiry = loop.call_later(max(0.0, left_s), batch.stop.set)
        lock = self._owner_turns[record.owner]
        try:
            owns = await first_unless(batch.stop, lock.acquire())
            try:
                await self._run_in_turn(batch)
            finally:
                if owns:
                    lock.release()
        except Exception:
            log.exception("a batch stops until the server starts again", extra={"fields": {"batch": record.id}})
        finally:
            expiry.cancel()

    async def _run_in_turn(self, batch: OpenBatch) -> None:
        run = BatchRun(
            batch,
            self._store,
            app=self._app,
            turns=self._turns,
            key=self._keys.get(batch.record.owner),
            max_body_bytes=self._max_body_bytes,
            closing=lambda: self._closing,
            retry_s=self._retry_s,
        )
        await run.run()

    async def _remove_expired(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_S)
            try:
                await self._store.remove_expired()
            except Exception:
                log.exception("expired files could not be removed")


def batch_runner(
    service: Service, app: ASGIApp, *, retry_s: float = FIRST_RETRY_S
) -> AbstractAsyncContextManager[object]:
    """Returns a context in which the server's batches run, if it has any. `app`: the application of the service."""
    if (store := service.batches) is None:
        return nullcontext()
    config = service.config
    keys = {service.rights(f"{CLIENT}-{number}").client_id: key for number, key in enumerate(config.api_keys)}
    return BatchRunner(
        store,
        app,
        admission=service.admission,
        keys=keys or {ANONYMOUS_OWNER: ""},
        max_body_bytes=config.max_body_bytes,
        retry_s=retry_s,
    )
