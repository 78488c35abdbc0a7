"""Grammars are compiled once before their groups are let in, so that a client hears at once what is wrong with one.

    grammar ── known? ──► on
                 └──► a thread, at most `NUM_THREADS` of a model's, for `TIMEOUT_S` at most ──► on, or 400

Compiling cannot be broken off, so a thread that takes too long is left to its end: its work is bounded, and others who
ask for the same grammar wait for the same thread.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from motet.constraint import Grammar
from motet.errors import GrammarError, OverloadedError
from motet.grammar.compiled import CompiledGrammar, Grammars

NUM_THREADS = 2
TIMEOUT_S = 5.0
MAX_UNDER_WAY = 32
"""New grammars of a model, those that wait for a thread among them."""


class GrammarChecks:
    """Of one model; asked on the event loop."""

    def __init__(
        self,
        kept: Callable[[Grammar], CompiledGrammar | None],
        compiled: Callable[[Grammar], CompiledGrammar],
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`kept` answers at once, `compiled` in a thread."""
        self._kept = kept
        self._compiled = compiled
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="motet-grammar")
        self._begun: set[Grammar] = set()
        self._under_way: dict[Grammar, asyncio.Future[CompiledGrammar]] = {}

    @classmethod
    def of(cls, grammars: Grammars) -> "GrammarChecks":
        return cls(grammars.kept, grammars.get)

    async def check(self, grammar: Grammar, *, called: str, param: str) -> None:
        """Raises `GrammarError` with `called` and `param` in it; `OverloadedError` if no thread came to be free."""
        if self._kept(grammar) is not None:
            return
        if grammar not in self._under_way:
            if len(self._under_way) >= MAX_UNDER_WAY:
                raise _too_many()
            self._start(grammar)
        compiling = asyncio.shield(self._under_way[grammar])
        try:
            await asyncio.wait_for(compiling, self._timeout_s)
        except TimeoutError:
            if grammar not in self._begun:
                raise _too_many() from None
            words = f"compiling it takes more than {self._timeout_s:g} s"
            raise GrammarError(f"Invalid {called}: {words}.", param=param) from None
        except GrammarError as error:
            raise GrammarError(f"Invalid {called}: {error.message}.", param=param) from error

    def _start(self, grammar: Grammar) -> None:
        def compile_it() -> CompiledGrammar:
            self._begun.add(grammar)
            return self._compiled(grammar)

        def ended(future: asyncio.Future[CompiledGrammar]) -> None:
            del self._under_way[grammar]
            self._begun.discard(grammar)
            if not future.cancelled():
                future.exception()  # somebody has looked at it, also if all who asked have left

        self._under_way[grammar] = asyncio.get_running_loop().run_in_executor(self._threads, compile_it)
        self._under_way[grammar].add_done_callback(ended)


def _too_many() -> OverloadedError:
    return OverloadedError("Too many new grammars are being compiled; try again.")
