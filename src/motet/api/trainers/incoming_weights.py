"""Tensors that come in the body of a request, as a safetensors file: they are written to memory as they come, and never
to a disk.

An update may come in one body, or in pieces between a start and a finish, as vLLM's clients send it:

    /start_weight_update                        an update is open
    /update_weights {"update_info": ...}        names the next tensors, and returns when they have come
    /update_weights, a safetensors file         brings them, before that or after it
    /finish_weight_update                       the engines get all that has come

Those of a trainer that sends over NCCL come without a body (`api.trainers.trainer_group`).
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from anyio import to_thread
from fastapi import Request
from starlette.requests import ClientDisconnect

from motet.api.http.failure import invalid_value
from motet.engines.wire import INVALID_WEIGHTS
from motet.errors import BodyTooLargeError, ModelLoadError, RequestError
from motet.models.checkpoint import Checkpoint, MemoryFile
from motet.models.folder import check_safetensors

ANNOUNCED_S = 300.0
"""Seconds for tensors to come that were named; a client of vLLM waits as long for the answer."""
MAX_LENGTH_DIGITS = 18
MAX_PIECES = 4096
"""Most bodies of one update. Each takes an open file."""

NOT_STARTED = "No weight update is open: POST /start_weight_update first."


async def read_tensors(request: Request) -> MemoryFile:
    """Returns the body, sealed. Raises RequestError if it is no whole safetensors file, or if there is no memory."""
    length = request.headers.get("content-length", "")
    if not (length.isdigit() and len(length) <= MAX_LENGTH_DIGITS):
        raise RequestError("A body of tensors needs a Content-Length.", code="length_required")
    try:
        file = await to_thread.run_sync(MemoryFile.create, int(length))  # a second for 5 GB
    except OSError as error:
        raise BodyTooLargeError(f"There is no memory for {length} bytes of tensors: {error.strerror}.") from error
    try:
        at = 0
        async for piece in request.stream():
            at = file.write(piece, at)
        file.seal()
        check_safetensors(file.path)
    except ClientDisconnect as error:
        file.close()
        raise RequestError("The client left before all tensors had come.", code=INVALID_WEIGHTS) from error
    except ModelLoadError as error:
        file.close()
        raise RequestError("The body is no whole safetensors file.", code=INVALID_WEIGHTS) from error
    except BaseException:
        file.close()
        raise
    return file


@dataclass
class OpenUpdate:
    """An update that has been started, and not finished."""

    files: list[MemoryFile] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    """The tensors that have come."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when tensors have come, or the update is over."""
    over: bool = False


class IncomingWeights:
    """The update that a trainer sends piece by piece. There is one at a time."""

    def __init__(self, *, announced_s: float = ANNOUNCED_S) -> None:
        """`announced_s`: the time that tensors which were named have to come."""
        self.waiting = 0
        """Number of requests that wait for tensors."""
        self._announced_s = announced_s
        self._update: OpenUpdate | None = None

    @property
    def open(self) -> bool:
        return self._update is not None

    def start(self) -> None:
        """Forgets what an update before has left."""
        self.drop()
        self._update = OpenUpdate()

    @property
    def now(self) -> OpenUpdate | None:
        """The update that is open at this moment."""
        return self._update

    def add(self, file: MemoryFile, to: OpenUpdate | None = None) -> None:
        """Adds tensors `to` an update, by default the one that is open. Raises RequestError if it is over, or if a
        tensor has come before."""
        update = to or self._opened()
        if update.over:
            file.close()
            raise RequestError("The weight update has ended before these tensors had come.", code="no_weight_update")
        names = check_safetensors(file.path)[0].keys()
        if again := sorted(names & update.names):
            file.close()
            raise RequestError(f"tensor {again[0]} has come before", code=INVALID_WEIGHTS)
        if len(update.files) >= MAX_PIECES:
            file.close()
            raise RequestError(f"an update may have {MAX_PIECES} bodies: send more tensors in each", code="too_many")
        update.files.append(file)
        update.names |= names
        update.changed.set()

    def check_new(self, names: Sequence[str]) -> None:
        """Raises RequestError unless an update is open, and tensors of these names may still come, each once."""
        seen = set(self._opened().names)
        for name in names:
            if name in seen:
                raise invalid_value("update_info.names", f"tensor {name} comes twice in this update")
            seen.add(name)

    async def wait_for(self, names: Collection[str]) -> None:
        """Returns when tensors of these names have come. Raises RequestError if they do not."""
        update = self._opened()
        self.waiting += 1
        try:
            async with asyncio.timeout(self._announced_s):
                while missing := sorted(set(names) - update.names):
                    update.changed.clear()
                    await update.changed.wait()
                    if update.over:
                        raise invalid_value("update_info", f"the update has ended before tensor {missing[0]} came")
        except TimeoutError as error:
            late = f"tensor {missing[0]} has not come within {self._announced_s:g} s"
            raise invalid_value("update_info", late) from error
        finally:
            self.waiting -= 1

    def finish(self) -> Checkpoint:
        """Returns all that has come. Raises RequestError if that is nothing, or if no update is open."""
        update = self._opened()
        if not update.files:
            self.drop()
            raise RequestError("No tensors have come since the weight update was started.", code=INVALID_WEIGHTS)
        self._close(update)
        return Checkpoint.of_memory(update.files)

    def drop(self) -> None:
        """Ends the update that is open, if there is one, and forgets what has come."""
        if (update := self._update) is not None:
            self._close(update)
            for file in update.files:
                file.close()

    def _close(self, update: OpenUpdate) -> None:
        self._update = None
        update.over = True
        update.changed.set()

    def _opened(self) -> OpenUpdate:
        if self._update is None:
            raise RequestError(NOT_STARTED, code="no_weight_update")
        return self._update
