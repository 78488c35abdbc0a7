"""Compiling a grammar holds up neither the event loop nor requests whose grammar is known."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from motet.api.served import MAX_UNDER_WAY, NUM_THREADS, GrammarChecks
from motet.errors import GrammarError, OverloadedError
from motet.grammar.compiled import CompiledGrammar, Grammars
from motet.types import Grammar, GrammarKind
from tests.grammar.models import TOKENIZER, VOCAB_SIZE, regex
from tests.patience import PATIENCE_S
from tests.tiny_tokenizer import EOS_ID

pytestmark = pytest.mark.anyio


class SlowCompiler(Grammars):
    """Compiles when the test lets it, and counts how often it was asked."""

    def __init__(self) -> None:
        super().__init__(lambda: TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_ID,))
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)
        self.asked: list[Grammar] = []

    def get(self, grammar: Grammar) -> CompiledGrammar:
        self.asked.append(grammar)
        self.begun.release()
        self.go.wait()
        return super().get(grammar)


@contextmanager
def slow_compiler() -> Iterator[SlowCompiler]:
    compiler = SlowCompiler()
    try:
        yield compiler
    finally:
        compiler.go.set()


async def check(checks: GrammarChecks, grammar: Grammar) -> None:
    await checks.check(grammar, called="'it'", param="it")


async def refused(checks: GrammarChecks, grammar: Grammar) -> GrammarError:
    """Asks until the grammar has taken too long in a thread: on a busy machine no thread may have it in so short a
    time."""
    while True:
        with suppress(OverloadedError):
            with pytest.raises(GrammarError) as caught:
                await check(checks, grammar)
            return caught.value


async def test_the_loop_goes_on_while_a_grammar_is_compiled() -> None:
    with slow_compiler() as compiler:
        checking = asyncio.ensure_future(check(GrammarChecks(compiler), regex("a")))
        await asyncio.to_thread(compiler.begun.acquire)  # it runs on while the compiler is held
        assert not checking.done()
        compiler.go.set()
        await checking


async def test_a_known_grammar_needs_no_thread() -> None:
    with slow_compiler() as compiler:
        compiler.go.set()
        compiler.get(regex("a"))
        await check(GrammarChecks(compiler), regex("a"))
        assert compiler.asked == [regex("a")]


async def test_one_grammar_that_many_ask_for_is_compiled_once() -> None:
    with slow_compiler() as compiler:
        checks = GrammarChecks(compiler)
        checking = [asyncio.ensure_future(check(checks, regex("a"))) for _ in range(5)]
        await asyncio.to_thread(compiler.begun.acquire)
        compiler.go.set()
        await asyncio.gather(*checking)
        assert compiler.asked == [regex("a")]


async def test_a_grammar_that_compiles_too_long_is_the_client_s_error() -> None:
    with slow_compiler() as compiler:
        error = await refused(GrammarChecks(compiler, timeout_s=0.05), regex("a"))
        assert error.message == "Invalid 'it': compiling it takes more than 0.05 s."
        assert (error.param, error.status) == ("it", 400)


async def test_a_grammar_that_waits_too_long_for_a_thread_is_an_overload() -> None:
    with slow_compiler() as compiler:
        checks = GrammarChecks(compiler, timeout_s=0.05)
        held = [asyncio.ensure_future(check(checks, regex(f"a{i}"))) for i in range(NUM_THREADS)]
        for _ in held:
            await asyncio.to_thread(compiler.begun.acquire)
        with pytest.raises(OverloadedError):
            await check(checks, regex("b"))
        assert len(compiler.asked) == NUM_THREADS
        await asyncio.gather(*held, return_exceptions=True)


async def test_no_more_grammars_may_wait_than_the_limit() -> None:
    with slow_compiler() as compiler:
        checks = GrammarChecks(compiler)
        held = [asyncio.ensure_future(check(checks, regex(f"a{i}"))) for i in range(MAX_UNDER_WAY)]
        await asyncio.to_thread(compiler.begun.acquire)
        with pytest.raises(OverloadedError):
            await check(checks, regex("b"))
        compiler.go.set()
        await asyncio.gather(*held)
        await check(checks, regex("b"))


async def test_a_repeated_request_after_a_time_out_waits_for_the_same_compilation() -> None:
    with slow_compiler() as compiler:
        checks = GrammarChecks(compiler, timeout_s=0.05)
        for _ in range(2):
            await refused(checks, regex("a"))
        assert compiler.asked == [regex("a")]


async def test_a_grammar_that_compiled_too_long_is_not_kept() -> None:
    """The grammar was refused, but used to be kept once it was compiled."""
    with slow_compiler() as compiler:
        checks = GrammarChecks(compiler, timeout_s=0.05)
        await refused(checks, regex("a"))
        compiler.go.set()
        async with asyncio.timeout(PATIENCE_S):
            while len(compiler.asked) == 1:  # until the first thread has ended
                with suppress(GrammarError, OverloadedError):
                    await check(checks, regex("a"))
        assert compiler.asked == [regex("a")] * 2


async def test_every_request_for_a_wrong_grammar_gets_the_error() -> None:
    with slow_compiler() as compiler:
        checks = GrammarChecks(compiler)
        wrong = Grammar(GrammarKind.JSON, '{"type":"text"}')
        checking = [asyncio.ensure_future(check(checks, wrong)) for _ in range(2)]
        await asyncio.to_thread(compiler.begun.acquire)
        compiler.go.set()
        told = await asyncio.gather(*checking, return_exceptions=True)
        assert [str(error)[:38] for error in told] == ["Invalid 'it': at type: 'text' is not a"] * 2
