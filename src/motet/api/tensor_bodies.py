"""Tensors in the body of a request, as a safetensors file: written to memory as they arrive, and never to disk."""

from functools import partial

from anyio import to_thread
from fastapi import Request
from starlette.requests import ClientDisconnect

from motet.engines.wire import INVALID_WEIGHTS
from motet.errors import BodyTooLargeError, ModelLoadError, RequestError
from motet.models.memory_file import MemoryFile
from motet.models.safetensors_header import check_safetensors

MAX_LENGTH_DIGITS = 18


async def read_tensors(request: Request) -> tuple[MemoryFile, frozenset[str]]:
    """Returns the body as a sealed file, and the names of its tensors. Raises RequestError unless it is a complete
    safetensors file, and BodyTooLargeError if there is no memory for it."""
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
        header, _ = await to_thread.run_sync(partial(check_safetensors, file.path, received_as="it"))
    except BaseException as error:
        file.close()
        if isinstance(error, ClientDisconnect):
            why = "The client disconnected before all tensors were received."
            raise RequestError(why, code=INVALID_WEIGHTS) from error
        if isinstance(error, ModelLoadError):
            raise RequestError(f"Invalid 'body': {error.message}.", param="body", code=INVALID_WEIGHTS) from error
        raise
    return file, frozenset(header)
