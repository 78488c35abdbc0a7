"""Tensors in the body of a request, as a safetensors file: written to memory as they arrive, and never to disk."""

from anyio import to_thread
from fastapi import Request
from starlette.requests import ClientDisconnect

from motet.engines.wire import INVALID_WEIGHTS
from motet.errors import BodyTooLargeError, ModelLoadError, RequestError
from motet.models.folder import check_safetensors
from motet.models.memory_file import MemoryFile

MAX_LENGTH_DIGITS = 18


async def read_tensors(request: Request) -> MemoryFile:
    """Returns the body as a sealed file. Raises RequestError unless it is a complete safetensors file, and
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
    except BaseException as error:
        file.close()
        if isinstance(error, ClientDisconnect):
            why = "The client disconnected before all tensors were received."
            raise RequestError(why, code=INVALID_WEIGHTS) from error
        if isinstance(error, ModelLoadError):
            raise RequestError("The body is not a complete safetensors file.", code=INVALID_WEIGHTS) from error
        raise
    return file
