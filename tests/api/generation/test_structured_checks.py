"""Compiling a grammar delays neither the event loop nor requests whose grammar is known."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from motet.api.openai.completions import CompletionRequest
from motet.api.served import MAX_CLIENTS, MAX_COMPILING, MAX_HEAVY_COMPILING, NUM_THREADS, TIMEOUT_S, GrammarChecks
from motet.errors import GrammarError, OverloadedError
from motet.grammar.compiled_grammar import CompiledGrammar, Grammars
from motet.types import Grammar, GrammarKind
from tests.grammar.models import TOKENIZER, VOCAB_SIZE, regex
from tests.patience import PATIENCE_S
from tests.tiny_tokenizer import EOS_ID

pytestmark = pytest.mark.anyio


class SlowCompiler(Grammars):
    """Compiles when the test allows it, and lists the grammars that it compiled."""

    def __init__(self) -> None:
        super().__init__(lambda: TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_ID,))
        self.go = threading.Event()
        self.started = threading.Semaphore(0)
        self.compiled: list[Grammar] = []

    def get(self, grammar: Grammar) -> CompiledGrammar:
        self.compiled.append(grammar)
        self.started.release()
        self.go.wait()
        return super().get(grammar)


@contextmanager
def slow_compiler() -> Iterator[SlowCompiler]:
    compiler = SlowCompiler()
    try:
        yield compiler
    finally:
        compiler.go.set()


def fits(grammar: Grammar) -> None:
    """Replaces the process that compiles a heavy grammar first."""


def checks_of(
    compiler: Grammars, *, timeout_s: float = TIMEOUT_S, try_apart: Callable[[Grammar], None] = fits
) -> GrammarChecks:
    return GrammarChecks(compiler, try_apart=try_apart, timeout_s=timeout_s)


async def check(checks: GrammarChecks, grammar: Grammar, *, client: str = "") -> None:
    await checks.check(grammar, called="'it'", param="it", client=client)


async def refused(checks: GrammarChecks, grammar: Grammar) -> GrammarError:
    """Repeats the check until it fails because compiling takes too long. On a busy machine it can happen that no
    thread is free in time."""
    while True:
        with suppress(OverloadedError):
            with pytest.raises(GrammarError) as caught:
                await check(checks, grammar)
            return caught.value


async def test_the_event_loop_runs_while_a_grammar_is_compiled() -> None:
    with slow_compiler() as compiler:
        checking = asyncio.ensure_future(check(checks_of(compiler), regex("a")))
        await asyncio.to_thread(compiler.started.acquire)  # it continues while the compiler is held
        assert not checking.done()
        compiler.go.set()
        await checking


async def test_a_known_grammar_needs_no_thread() -> None:
    with slow_compiler() as compiler:
        compiler.go.set()
        compiler.get(regex("a"))
        await check(checks_of(compiler), regex("a"))
        assert compiler.compiled == [regex("a")]


async def test_a_grammar_of_many_requests_is_compiled_once() -> None:
    with slow_compiler() as compiler:
        checks = checks_of(compiler)
        checking = [asyncio.ensure_future(check(checks, regex("a"))) for _ in range(5)]
        await asyncio.to_thread(compiler.started.acquire)
        compiler.go.set()
        await asyncio.gather(*checking)
        assert compiler.compiled == [regex("a")]


async def test_a_grammar_that_compiles_too_long_is_the_client_s_error() -> None:
    with slow_compiler() as compiler:
        error = await refused(checks_of(compiler, timeout_s=0.05), regex("a"))
        assert error.message == "Invalid 'it': compiling it takes more than 0.05 s."
        assert (error.param, error.status) == ("it", 400)


async def test_a_grammar_that_waits_too_long_for_a_thread_is_an_overload() -> None:
    with slow_compiler() as compiler:
        checks = checks_of(compiler, timeout_s=0.05)
        held = [asyncio.ensure_future(check(checks, regex(f"a{i}"))) for i in range(NUM_THREADS)]
        for _ in held:
            await asyncio.to_thread(compiler.started.acquire)
        with pytest.raises(OverloadedError):
            await check(checks, regex("b"))
        assert len(compiler.compiled) == NUM_THREADS
        await asyncio.gather(*held, return_exceptions=True)


@pytest.mark.slow
async def test_no_more_grammars_can_wait_than_the_limit() -> None:
    with slow_compiler() as compiler:
        checks = checks_of(compiler)
        held = [asyncio.ensure_future(check(checks, regex(f"a{i}"))) for i in range(MAX_COMPILING)]
        await asyncio.to_thread(compiler.started.acquire)
        with pytest.raises(OverloadedError):
            await check(checks, regex("b"))
        compiler.go.set()
        await asyncio.gather(*held)
        await check(checks, regex("b"))


async def test_a_repeated_request_after_a_time_out_waits_for_the_same_compilation() -> None:
    with slow_compiler() as compiler:
        checks = checks_of(compiler, timeout_s=0.05)
        for _ in range(2):
            await refused(checks, regex("a"))
        assert compiler.compiled == [regex("a")]


async def test_a_grammar_that_compiled_too_long_is_not_kept() -> None:
    """A refused grammar used to be kept once it was compiled."""
    with slow_compiler() as compiler:
        checks = checks_of(compiler, timeout_s=0.05)
        await refused(checks, regex("a"))
        compiler.go.set()
        async with asyncio.timeout(PATIENCE_S):
            while len(compiler.compiled) == 1:  # until the first thread has ended
                with suppress(GrammarError, OverloadedError):
                    await check(checks, regex("a"))
        assert compiler.compiled == [regex("a")] * 2


async def test_every_request_for_a_wrong_grammar_gets_the_error() -> None:
    with slow_compiler() as compiler:
        checks = checks_of(compiler)
        wrong = Grammar(GrammarKind.JSON, '{"type":"text"}')
        checking = [asyncio.ensure_future(check(checks, wrong)) for _ in range(2)]
        await asyncio.to_thread(compiler.started.acquire)
        compiler.go.set()
        errors = await asyncio.gather(*checking, return_exceptions=True)
        assert [str(error)[:38] for error in errors] == ["Invalid 'it': at type: 'text' is not a"] * 2


def heavy(name: str) -> Grammar:
    """Returns a grammar that a process compiles first."""
    return Grammar(GrammarKind.JSON, json.dumps({"patternProperties": {name: {"type": "integer"}}}))


async def test_heavy_grammars_do_not_hold_up_light_ones() -> None:
    go, started = threading.Event(), threading.Event()

    def hold(_: Grammar) -> None:
        started.set()
        go.wait()

    with slow_compiler() as compiler:
        compiler.go.set()
        checks = checks_of(compiler, try_apart=hold)
        held = [asyncio.ensure_future(check(checks, heavy(f"a{i}"))) for i in range(MAX_HEAVY_COMPILING)]
        await asyncio.to_thread(started.wait)
        with pytest.raises(OverloadedError):
            await check(checks, heavy("b"))
        await check(checks, regex("a"))
        assert compiler.compiled == [regex("a")]
        go.set()
        await asyncio.gather(*held)
        assert len(compiler.compiled) == 1 + MAX_HEAVY_COMPILING


async def test_clients_take_turns_with_their_heavy_grammars() -> None:
    """Regression: one client with eight such grammars, of 5 s each, got all others 503."""
    go, started = threading.Event(), threading.Event()
    tried: list[Grammar] = []

    def hold(grammar: Grammar) -> None:
        tried.append(grammar)
        started.set()
        go.wait()

    with slow_compiler() as compiler:
        compiler.go.set()
        checks = checks_of(compiler, try_apart=hold)
        names = [f"a{i}" for i in range(MAX_HEAVY_COMPILING)]
        held = [asyncio.ensure_future(check(checks, heavy(name), client="busy")) for name in names]
        await asyncio.to_thread(started.wait)
        with pytest.raises(OverloadedError):
            await check(checks, heavy("a"), client="busy")
        other = asyncio.ensure_future(check(checks, heavy("b"), client="other"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(other, *held)
    assert tried == [heavy("a0"), heavy("b"), *map(heavy, names[1:])]


@pytest.mark.slow
async def test_the_grammars_of_all_clients_together_are_limited() -> None:
    with slow_compiler() as compiler:
        checks = checks_of(compiler)
        clients = [f"client {i // MAX_COMPILING}" for i in range(MAX_CLIENTS * MAX_COMPILING)]
        held = [asyncio.ensure_future(check(checks, regex(f"a{i}"), client=one)) for i, one in enumerate(clients)]
        await asyncio.to_thread(compiler.started.acquire)
        with pytest.raises(OverloadedError):
            await check(checks, regex("b"), client="another")
        compiler.go.set()
        await asyncio.gather(*held)


@pytest.mark.parametrize("clients_own", [True, False])
async def test_a_clients_own_grammar_is_compiled_apart_first_however_short_it_is(clients_own: bool) -> None:
    tried: list[Grammar] = []
    grammar = Grammar(GrammarKind.LARK, 'start: "a"')
    with slow_compiler() as compiler:
        compiler.go.set()
        checks = checks_of(compiler, try_apart=tried.append)
        await checks.check(grammar, called="it", param="it", clients_own=clients_own)
    assert tried == [grammar] * clients_own


async def test_only_a_grammar_is_a_clients_own() -> None:
    forms: dict[str, object] = {"grammar": 'start: "a"', "regex": "a", "choice": ["a"], "json": {}, "json_object": True}
    for name, value in forms.items():
        request = CompletionRequest.model_validate({"prompt": "x", "structured_outputs": {name: value}})
        assert request.form is not None
        assert request.form.clients_own == (name == "grammar")


async def test_a_heavy_grammar_that_was_refused_is_not_tried_again() -> None:
    tried: list[Grammar] = []

    def refuse(grammar: Grammar) -> None:
        tried.append(grammar)
        raise GrammarError("compiling it takes more than 5 s")

    with slow_compiler() as compiler:
        checks = checks_of(compiler, try_apart=refuse)
        for _ in range(2):
            with pytest.raises(GrammarError, match="Invalid 'it': compiling it takes more than 5 s"):
                await check(checks, heavy("a"))
        assert (tried, compiler.compiled) == ([heavy("a")], [])
