"""A checkpoint whose files a client sends one by one. vLLM's trainers send several files between a start and a finish:

    /start_weight_update                        opens an upload
    /update_weights {"update_info": ...}        names the next tensors, and returns when they have been received
    /update_weights, a safetensors file         contains the tensors; sent before or after the request that names them
    /finish_weight_update                       gives the engines all received tensors

A trainer that sends over NCCL sends no bodies (`api.trainers.trainer_group`). A gateway sends each of its files in
memory to `/engine/checkpoint`, and then an order to prepare the files (`api.worker.engine_routes`)."""

import asyncio
from collections.abc import Collection, Sequence, Set

from motet.engines.wire import INVALID_WEIGHTS
from motet.errors import RequestError
from motet.models.checkpoint import Checkpoint
from motet.models.memory_file import MemoryFile

ANNOUNCED_S = 300.0
"""Maximum time in seconds to wait for announced tensors: the time that vLLM's client waits for the answer."""
MAX_FILES = 4096
"""Maximum number of files of an upload. The server keeps all of them open."""


class CheckpointUpload:
    """The files of one upload, from its start to `finish` or `drop`."""

    def __init__(self, *, announced_s: float = ANNOUNCED_S) -> None:
        self.files: list[MemoryFile] = []
        self.waiting = 0
        """Number of requests that wait for announced tensors."""
        self._announced_s = announced_s
        self._names: set[str] = set()
        """Names of the received tensors."""
        self._changed = asyncio.Event()
        """Set when tensors have been received, or the upload has ended."""
        self._ended = False

    def add(self, file: MemoryFile, names: Set[str]) -> None:
        """Adds a file with tensors of these names. Closes it and raises RequestError if the upload has ended, or if it
        repeats a tensor."""
        try:
            if self._ended:
                message = "The weight update ended before these tensors were received."
                raise RequestError(message, code="no_weight_update")
            if again := sorted(names & self._names):
                raise RequestError(f"tensor {again[0]} was already received", code=INVALID_WEIGHTS)
            if len(self.files) >= MAX_FILES:
                raise RequestError(
                    f"an update can have at most {MAX_FILES} bodies: send more tensors in each", code="too_many"
                )
        except BaseException:
            file.close()
            raise
        self.files.append(file)
        self._names |= names
        self._changed.set()

    def check_new(self, names: Sequence[str]) -> None:
        """Raises RequestError if one of these tensors was already received, or is named twice."""
        known = set(self._names)
        for name in names:
            if name in known:
                raise _invalid("update_info.names", f"tensor {name} is in this update twice")
            known.add(name)

    async def wait_for(self, names: Collection[str]) -> None:
        """Waits until tensors of these names have been received. Raises RequestError if they do not arrive."""
        self.waiting += 1
        try:
            async with asyncio.timeout(self._announced_s):
                while missing := sorted(set(names) - self._names):
                    self._changed.clear()
                    await self._changed.wait()
                    if self._ended:
                        raise _invalid("update_info", f"the update ended before tensor {missing[0]} was received")
        except TimeoutError as error:
            late = f"tensor {missing[0]} was not received within {self._announced_s:g} s"
            raise _invalid("update_info", late) from error
        finally:
            self.waiting -= 1

    def finish(self) -> Checkpoint:
        """Ends the upload, and returns its files. Raises RequestError if there are none."""
        self._end()
        if not self.files:
            raise RequestError("No tensors were received since the weight update started.", code=INVALID_WEIGHTS)
        return Checkpoint.of_memory(self.files)

    def drop(self) -> None:
        """Ends the upload, and closes its files."""
        self._end()
        for file in self.files:
            file.close()

    def _end(self) -> None:
        self._ended = True
        self._changed.set()


def _invalid(param: str, why: str) -> RequestError:
    return RequestError(f"Invalid '{param}': {why}.", param=param, code="invalid_value")
