"""Compiles grammars while steps continue. Groups with a grammar wait until their choices have matchers.

    Submit ─► Compiling.submit ─► a thread: compiles, copies the matcher for each choice, consumes its output tokens
                                     │
              the loop, woken by `fileno` ─► take ─► core.submit

During this time a group can be aborted and its choices can be stopped. The result for an aborted group is dropped. The
threads are daemons, so the process does not wait for them when it ends. The limits of the grammar package bound their
work.
"""

import logging
import threading
from queue import SimpleQueue

import msgspec

from motet.errors import EngineError, GrammarError, ModelLoadError, MotetError, RequestError
from motet.grammar.compiled_grammar import Grammars, Matcher
from motet.ids import RequestId
from motet.transfer.mailbox import Mailbox
from motet.types import GenerateRequest

logger = logging.getLogger(__name__)

NUM_THREADS = 2
"""Number of compiling threads. With two threads, one expensive grammar does not delay all other grammars. A third
thread would only take more processor time from the steps."""

Matchers = dict[int, Matcher] | MotetError
"""A matcher for each choice, by its index, or the error that prevented them."""


class Compiling:
    """Owned by the engine loop, whose thread calls all methods. Only the compiling itself runs in other threads."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._open: dict[RequestId, tuple[GenerateRequest, GenerateRequest]] = {}
        """Each waiting group as it was submitted, and the same group without stopped choices. The submitted request is
        compared by identity, because a request id can be used again."""
        self._tasks = SimpleQueue[GenerateRequest | None]()
        self._done = Mailbox[tuple[GenerateRequest, Matchers]]()
        self._threads = [
            threading.Thread(target=self._work, name=f"grammar-{i}", daemon=True) for i in range(NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        """Returns a descriptor that is readable while `take` has something to return."""
        return self._done.fileno()

    @property
    def waiting(self) -> list[GenerateRequest]:
        """Requests of the groups that wait for matchers."""
        return [request for _, request in self._open.values()]

    def submit(self, request: GenerateRequest) -> None:
        """Queues a group for compiling. Raises RequestError if a group with this id is already waiting."""
        if request.request_id in self._open:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        self._open[request.request_id] = request, request
        self._tasks.put(request)

    def abort(self, request_id: RequestId) -> GenerateRequest | None:
        """Removes a group and returns its request; None if the group is not waiting."""
        return self._open.pop(request_id, (None, None))[1]

    def stop_choice(self, request_id: RequestId, index: int) -> bool:
        """Removes one choice. Returns False if the group is waiting and has no choice left."""
        if (waiting := self._open.get(request_id)) is None:
            return True
        submitted, request = waiting
        choices = tuple(start for start in request.choices if start.index != index)
        self._open[request_id] = submitted, msgspec.structs.replace(request, choices=choices)
        return bool(choices)

    def take(self) -> list[tuple[GenerateRequest, Matchers]]:
        """Returns the groups that were compiled since the last call, in order, without choices that were stopped."""
        ready = []
        for done, matchers in self._done.take():
            submitted, request = self._open.get(done.request_id, (None, done))
            if submitted is done:
                del self._open[done.request_id]
                ready.append((request, matchers))
        return ready

    def close(self) -> None:
        """Ends the threads after their current task."""
        self._open.clear()
        for _ in self._threads:
            self._tasks.put(None)
        self._done.close()

    def _work(self) -> None:
        while (request := self._tasks.get()) is not None:
            matchers: Matchers
            try:
                matchers = matchers_of(self._grammars, request)
            except RequestError as error:
                matchers = error
            except Exception as error:  # an error of the grammar library ends this group, never the thread
                logger.exception("a grammar could not be compiled")
                matchers = EngineError(f"the grammar could not be compiled: {error}")
            self._done.put((request, matchers))


def matchers_of(grammars: Grammars | None, request: GenerateRequest) -> dict[int, Matcher]:
    """Returns a matcher for each choice, by its index; an empty dict without a grammar. Compiling can take a long time.
    Raises GrammarError if the grammar cannot be compiled, or does not allow the output tokens of a choice."""
    grammar = request.sampling.grammar
    if grammar is None:
        return {}
    if grammars is None:
        raise GrammarError("this engine has no tokenizer, which a grammar needs")
    try:
        compiled = grammars.get(grammar)
    except ModelLoadError as error:
        raise GrammarError(f"a grammar needs the model's tokenizer: {error.message}") from error
    return {start.index: compiled.matcher(start.output_tokens) for start in request.choices}


def at_once(grammars: Grammars | None, request: GenerateRequest) -> bool:
    """Returns True if `matchers_of` only copies matchers: the grammar is compiled, and no choice has output tokens."""
    grammar = request.sampling.grammar
    if grammar is None or grammars is None:
        return True
    return grammars.cached(grammar) is not None and not any(start.output_tokens for start in request.choices)
