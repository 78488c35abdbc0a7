"""Compiles grammars beside the steps: groups that need one wait here until their choices have matchers.

    Submit ─► Compiling.submit ─► a thread: compiles, copies for each choice, reads what it has written
                                     │
              the loop, woken by `fileno` ─► take ─► core.submit

Meanwhile a group may be aborted and its choices stopped; a result that nobody needs any more is dropped. The threads
are daemons: when the process ends, it does not wait for them. Limits of the grammar package bound their work.
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
"""Two, so that one expensive grammar does not hold up all others; a third would only take more from the steps."""


Matchers = dict[int, Matcher] | MotetError
"""A matcher for each choice, by its index, or why there are none."""


class Compiling:
    """Owned by the engine loop: everything except compiling happens in the loop's thread."""

    def __init__(self, grammars: Grammars | None, *, num_threads: int = NUM_THREADS) -> None:
        self._grammars = grammars
        self._open: dict[RequestId, tuple[GenerateRequest, GenerateRequest]] = {}
        """Each group as it was submitted (compared by identity, since an id may return), without stopped choices."""
        self._tasks = SimpleQueue[GenerateRequest | None]()
        self._done = Mailbox[tuple[GenerateRequest, Matchers]]()
        self._threads = [
            threading.Thread(target=self._work, name=f"grammar-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        """Returns a descriptor that is readable while `take` has something to return."""
        return self._done.fileno()

    @property
    def waiting(self) -> list[GenerateRequest]:
        """Groups that are not ready."""
        return [request for _, request in self._open.values()]

    def submit(self, request: GenerateRequest) -> None:
        """Raises RequestError if a group of this id is here already."""
        if request.request_id in self._open:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        self._open[request.request_id] = request, request
        self._tasks.put(request)

    def abort(self, request_id: RequestId) -> GenerateRequest | None:
        """Drops a group and returns it; None if it is not here."""
        return self._open.pop(request_id, (None, None))[1]

    def stop_choice(self, request_id: RequestId, index: int) -> bool:
        """Drops one choice. Returns False if the group is here and has no choice left."""
        if (found := self._open.get(request_id)) is None:
            return True
        submitted, request = found
        left = tuple(start for start in request.choices if start.index != index)
        self._open[request_id] = submitted, msgspec.structs.replace(request, choices=left)
        return bool(left)

    def take(self) -> list[tuple[GenerateRequest, Matchers]]:
        """Returns the groups that have become ready, in that order, without choices that were stopped meanwhile."""
        ready = []
        for done, matchers in self._done.take():
            submitted, request = self._open.get(done.request_id, (None, done))
            if submitted is done:
                del self._open[done.request_id]
                ready.append((request, matchers))
        return ready

    def close(self) -> None:
        """Lets the threads end after their present work."""
        self._open.clear()
        for _ in self._threads:
            self._tasks.put(None)
        self._done.close()

    def _work(self) -> None:
        while (request := self._tasks.get()) is not None:
            self._done.put((request, self._matchers(request)))

    def _matchers(self, request: GenerateRequest) -> Matchers:
        try:
            return matchers_of(self._grammars, request)
        except RequestError as error:
            return error
        except Exception as error:  # an error of the library ends this group, never the thread
            logger.exception("a grammar could not be compiled")
            return EngineError(f"the grammar could not be compiled: {error}")


def matchers_of(grammars: Grammars | None, request: GenerateRequest) -> dict[int, Matcher]:
    """Returns a matcher for each choice, by its index, if the group has a grammar. Compiling may take long. Raises
    GrammarError if the grammar cannot be compiled, or does not allow what a choice has written."""
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
    """Returns True if `matchers_of` takes no longer than a few copies."""
    grammar = request.sampling.grammar
    if grammar is None or grammars is None:
        return True
    return grammars.kept(grammar) is not None and not any(start.output_tokens for start in request.choices)
