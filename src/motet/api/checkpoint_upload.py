"""Tensors in the body of a request, as a safetensors file. They are written to memory as they come, and never to disk.

A checkpoint can come in one body, or in several. vLLM's trainers send several between a start and a finish:

    /start_weight_update                        opens an upload
    /update_weights {"update_info": ...}        names the next tensors, and returns when they have come
    /update_weights, a safetensors file         brings them, before that or after it
    /finish_weight_update                       gives the engines all tensors that have come

The tensors of a trainer that sends over NCCL come without a body (`api.trainers.trainer_group`). A gateway sends each
file in its memory to `/engine/checkpoint`, and then an order to prepare them (`api.worker.order_routes`).
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
"""Time in seconds for announced tensors to come. vLLM's client waits for the answer for the same time."""
MAX_LENGTH_DIGITS = 18
MAX_FILES = 4096
"""Maximum number of files of an upload. Each is an open file of the server."""

NOT_STARTED = "No weight update is open: POST /start_weight_update first."


async def read_tensors(request: Request) -> MemoryFile:
    """Returns the body as a sealed file. Raises RequestError if it is not a complete safetensors file, and
    BodyTooLargeError if there is no memory for it."""
    length = request.headers.get("content-length", "")
    if not (length.isdigit() and len(length) <= MAX_LENGTH_DIGITS):
        raise RequestError("A body of tensors needs a Content-Length.", code="length_required")
    try:
        file = await to_thread.run_sync(MemoryFile.create, int(length))  # takes a second for 5 GB
    except OSError as error:
        raise BodyTooLargeError(f"There is no memory for {length} bytes of tensors: {error.strerror}.") from error
    try:
        at = 0
        async for chunk in request.stream():
            at = file.write(chunk, at)
        file.seal()
        check_safetensors(file.path)
    except ClientDisconnect as error:
        file.close()
        raise RequestError("The client left before all tensors had come.", code=INVALID_WEIGHTS) from error
    except ModelLoadError as error:
        file.close()
        raise RequestError("The body is not a complete safetensors file.", code=INVALID_WEIGHTS) from error
    except BaseException:
        file.close()
        raise
    return file


@dataclass
class UploadedFiles:
    """The files of an upload that is open."""

    files: list[MemoryFile] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    """Names of the tensors that have come."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when tensors have come, or the upload has ended."""
    ended: bool = False


class CheckpointUpload:
    """A checkpoint that a client sends in several files. One upload is open at a time."""

    def __init__(self, *, announced_s: float = ANNOUNCED_S) -> None:
        """`announced_s`: time in seconds for announced tensors to come."""
        self.waiting = 0
        """Number of requests that wait for announced tensors."""
        self._announced_s = announced_s
        self._upload: UploadedFiles | None = None

    @property
    def open(self) -> bool:
        return self._upload is not None

    @property
    def now(self) -> UploadedFiles | None:
        """The upload that is open at this moment."""
        return self._upload

    @property
    def num_files(self) -> int:
        return 0 if self._upload is None else len(self._upload.files)

    def start(self) -> None:
        """Opens an upload. Forgets the files of an earlier one."""
        self.drop()
        self._upload = UploadedFiles()

    def add(self, file: MemoryFile, to: UploadedFiles | None = None) -> None:
        """Adds a file `to` an upload, by default to the one that is open. Closes the file and raises RequestError if
        that upload has ended, or if one of the tensors has come before."""
        try:
            upload = to or self._opened()
            if upload.ended:
                message = "The weight update has ended before these tensors had come."
                raise RequestError(message, code="no_weight_update")
            names = check_safetensors(file.path)[0].keys()
            if again := sorted(names & upload.names):
                raise RequestError(f"tensor {again[0]} has come before", code=INVALID_WEIGHTS)
            if len(upload.files) >= MAX_FILES:
                message = f"an update may have {MAX_FILES} bodies: send more tensors in each"
                raise RequestError(message, code="too_many")
        except BaseException:
            file.close()
            raise
        upload.files.append(file)
        upload.names |= names
        upload.changed.set()

    def check_new(self, names: Sequence[str]) -> None:
        """Raises RequestError unless an upload is open, and none of these tensors has come or is named twice."""
        known = set(self._opened().names)
        for name in names:
            if name in known:
                raise invalid_value("update_info.names", f"tensor {name} comes twice in this update")
            known.add(name)

    async def wait_for(self, names: Collection[str]) -> None:
        """Returns when tensors of these names have come. Raises RequestError if they do not."""
        upload = self._opened()
        self.waiting += 1
        try:
            async with asyncio.timeout(self._announced_s):
                while missing := sorted(set(names) - upload.names):
                    upload.changed.clear()
                    await upload.changed.wait()
                    if upload.ended:
                        raise invalid_value("update_info", f"the update has ended before tensor {missing[0]} came")
        except TimeoutError as error:
            late = f"tensor {missing[0]} has not come within {self._announced_s:g} s"
            raise invalid_value("update_info", late) from error
        finally:
            self.waiting -= 1

    def finish(self) -> Checkpoint:
        """Ends the upload, and returns all files. Raises RequestError if there are none, or if no upload is open."""
        upload = self._opened()
        if not upload.files:
            self.drop()
            raise RequestError("No tensors have come since the weight update was started.", code=INVALID_WEIGHTS)
        self._end(upload)
        return Checkpoint.of_memory(upload.files)

    def drop(self) -> None:
        """Ends the open upload, if there is one, and forgets its files."""
        if (upload := self._upload) is not None:
            self._end(upload)
            for file in upload.files:
                file.close()

    def _end(self, upload: UploadedFiles) -> None:
        self._upload = None
        upload.ended = True
        upload.changed.set()

    def _opened(self) -> UploadedFiles:
        if self._upload is None:
            raise RequestError(NOT_STARTED, code="no_weight_update")
        return self._upload
