"""Tensors that arrive with requests: bodies with a safetensors file, which are written to memory as they arrive and
never to disk, and the limit on the memory of all of them."""

from collections.abc import Callable
from functools import partial

from anyio import to_thread
from fastapi import Request
from starlette.requests import ClientDisconnect

from motet.engines.wire import INVALID_WEIGHTS
from motet.errors import BodyTooLargeError, ModelLoadError, OverloadedError, RequestError
from motet.models.checkpoint import max_checkpoint_bytes
from motet.models.memory_file import MemoryFile
from motet.models.safetensors_header import check_safetensors

MAX_LENGTH_DIGITS = 18


class TensorMemory:
    """Limits the memory of the tensors that arrive with requests, from the announcement of their size until the engines
    have applied or dropped them. All together can have the size of one checkpoint in float32."""

    def __init__(self, *, minimum_bytes: int, num_weights: Callable[[], int]) -> None:
        """`minimum_bytes`: minimum of the limit, for small models. `num_weights`: returns the number of the model's
        weights; 0 if it is not known."""
        self._minimum_bytes = minimum_bytes
        self._num_weights = num_weights
        self.held_bytes = 0

    @property
    def limit_bytes(self) -> int:
        return max(self._minimum_bytes, max_checkpoint_bytes(self._num_weights()))

    async def create(self, num_bytes: int) -> MemoryFile:
        """Returns a file of this size, which counts until it is settled. Raises BodyTooLargeError if it exceeds the
        limit or the memory of the machine, and OverloadedError while other requests have the memory."""
        limit = self.limit_bytes
        if num_bytes > limit:
            raise BodyTooLargeError(
                f"{num_bytes} bytes of tensors are more than a complete checkpoint of the model in float32; the "
                f"maximum is {limit}."
            )
        if num_bytes > limit - self.held_bytes:
            raise OverloadedError(
                f"There is no space for {num_bytes} bytes of tensors: the tensors of other requests have "
                f"{self.held_bytes} of {limit} bytes. Try again later."
            )
        self.held_bytes += num_bytes
        try:
            file = await to_thread.run_sync(MemoryFile.create, num_bytes)  # takes a second for 5 GB
        except BaseException as error:
            self.held_bytes -= num_bytes
            if isinstance(error, OSError):
                message = f"There is no memory for {num_bytes} bytes of tensors: {error.strerror}."
                raise BodyTooLargeError(message) from error
            raise
        file.on_settled = partial(self._release, num_bytes)
        return file

    def _release(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes


async def read_tensors(request: Request, memory: TensorMemory) -> tuple[MemoryFile, frozenset[str]]:
    """Returns the body as a sealed file, and the names of its tensors. Raises RequestError unless it is a complete
    safetensors file, and the errors of `TensorMemory.create` before the body is read."""
    length = request.headers.get("content-length", "")
    if not (length.isdigit() and len(length) <= MAX_LENGTH_DIGITS):
        raise RequestError("A body of tensors needs a Content-Length.", code="length_required")
    file = await memory.create(int(length))
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
