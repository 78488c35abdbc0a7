"""Compiles grammars beside the steps: groups that need one wait here until their choices have matchers.

    Submit ─► Compiling.submit ─► a thread: compiles, copies for each choice, reads what it has written
                                     │
              the loop, woken by `fileno` ─► take ─► core.submit

Meanwhile a group may be aborted and its choices stopped; what is then compiled for nobody is dropped. The threads are
daemons: one that is at work when the process is to end is not waited for. Limits of the grammar package bound its work.
"""

import logging
import threading
from dataclasses import dataclass
from queue import SimpleQueue

import msgspec

from motet.engines.native.matchers import matchers_of
from motet.errors import EngineError, MotetError, RequestError
from motet.grammar.compiled import Grammars, Matcher
from motet.ids import RequestId
from motet.transfer.mailbox import Mailbox
from motet.types import GenerateRequest

logger = logging.getLogger(__name__)

NUM_THREADS = 2
"""So that one expensive grammar does not hold up all others; a third would only take more from the steps."""


@dataclass(frozen=True)
class Compiled:
    """A group that may be submitted now."""

    request: GenerateRequest
    """Without the choices that were stopped meanwhile."""
    matchers: dict[int, Matcher] | MotetError
    """By index of the choice, or why there are none."""


@dataclass(frozen=True)
class _Task:
    """Another one for each submission: an id may come again after an abort."""

    request: GenerateRequest


class Compiling:
    """Owned by the loop: all but the threads' work happens in its thread."""

    def __init__(self, grammars: Grammars | None, *, num_threads: int = NUM_THREADS) -> None:
        self._grammars = grammars
        self._open: dict[RequestId, tuple[_Task, GenerateRequest]] = {}
        """What is being compiled, and what of its group is still wanted."""
        self._tasks = SimpleQueue[_Task | None]()
        self._done = Mailbox[tuple[_Task, dict[int, Matcher] | MotetError]]()
        self._threads = [
            threading.Thread(target=self._work, name=f"grammar-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        """Readable while something lies ready for `take`."""
        return self._done.fileno()

    @property
    def waiting(self) -> list[GenerateRequest]:
        """Groups that are not ready."""
        return [request for _, request in self._open.values()]

    def submit(self, request: GenerateRequest) -> None:
        """RequestError if a group of this id is here already."""
        if request.request_id in self._open:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        task = _Task(request)
        self._open[request.request_id] = task, request
        self._tasks.put(task)

    def abort(self, request_id: RequestId) -> GenerateRequest | None:
        """The group is not wanted any more; None if it is not here."""
        found = self._open.pop(request_id, None)
        return None if found is None else found[1]

    def stop_choice(self, request_id: RequestId, index: int) -> bool:
        """One choice less; whether the group still has any, or is not here."""
        if (found := self._open.get(request_id)) is None:
            return True
        task, request = found
        left = tuple(start for start in request.choices if start.index != index)
        self._open[request_id] = task, msgspec.structs.replace(request, choices=left)
        return bool(left)

    def take(self) -> list[Compiled]:
        """The groups that are ready, in the order in which they became so."""
        ready = []
        for task, matchers in self._done.take():
            task_now, request = self._open.get(task.request.request_id, (None, task.request))
            if task_now is task:
                del self._open[request.request_id]
                ready.append(Compiled(request, matchers))
        return ready

    def close(self) -> None:
        """The threads end after what they are at."""
        self._open.clear()
        for _ in self._threads:
            self._tasks.put(None)
        self._done.close()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._done.put((task, self._matchers(task.request)))

    def _matchers(self, request: GenerateRequest) -> dict[int, Matcher] | MotetError:
        try:
            return matchers_of(self._grammars, request)
        except RequestError as error:
            return error
        except Exception as error:  # of the library: it ends this group, never the thread
            logger.exception("a grammar could not be compiled")
            return EngineError(f"the grammar could not be compiled: {error}")
