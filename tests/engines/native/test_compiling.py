"""Grammars are compiled in threads. The tests delay the compiler, and groups end during this time."""

import select
import threading
from collections.abc import Iterator

import pytest

from motet.engines.native.compiling import Compiling, Matchers, at_once
from motet.errors import EngineError, GrammarError, RequestError
from motet.grammar.compiled_grammar import CompiledGrammar, Grammars
from motet.ids import RequestId
from motet.types import ChoiceStart, GenerateRequest, Grammar, GrammarKind
from tests.engines.native.drive import group, prompt_of
from tests.engines.native.grammars import EOS_IDS, NUMBER, PERSON, WORD, tiny_tokenizer, token_of
from tests.tiny_models import VOCAB_SIZE

BROKEN = Grammar(GrammarKind.REGEX, "(((")
CRASHING = Grammar(GrammarKind.REGEX, "crash")


class HeldGrammars(Grammars):
    """Grammars that compile only when the test allows it."""

    def __init__(self) -> None:
        super().__init__(tiny_tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=EOS_IDS)
        self.allowed = threading.Semaphore(0)

    def get(self, grammar: Grammar) -> CompiledGrammar:
        self.allowed.acquire()
        if grammar == CRASHING:
            raise ArithmeticError("an error that is not a GrammarError")
        return super().get(grammar)


@pytest.fixture
def grammars() -> HeldGrammars:
    return HeldGrammars()


@pytest.fixture
def compiling(grammars: HeldGrammars) -> Iterator[Compiling]:
    before = threading.active_count()
    made = Compiling(grammars)
    yield made
    made.close()
    grammars.allowed.release(100)
    for thread in threading.enumerate():
        if thread.name.startswith("grammar-"):
            thread.join(10)
    assert threading.active_count() == before


def with_grammar(name: str, grammar: Grammar = PERSON, **fields: object) -> GenerateRequest:
    return group(name, prompt_of(8), grammar=grammar, **fields)  # type: ignore[arg-type]


def taken(compiling: Compiling) -> list[tuple[GenerateRequest, Matchers]]:
    """Waits for compiled groups, and returns them as the engine loop gets them."""
    ready, _, _ = select.select([compiling.fileno()], [], [], 10)
    assert ready, "the loop was not woken"
    return compiling.take()


def test_a_group_comes_back_with_a_matcher_for_each_choice(compiling: Compiling, grammars: HeldGrammars) -> None:
    request = with_grammar("g", n=3)
    compiling.submit(request)
    assert compiling.take() == []
    assert compiling.waiting == [request]
    grammars.allowed.release()
    ((compiled, matchers),) = taken(compiling)
    assert compiled == request
    assert isinstance(matchers, dict) and sorted(matchers) == [0, 1, 2]
    assert len({id(matcher.inner) for matcher in matchers.values()}) == 3
    assert compiling.waiting == []


def test_output_tokens_are_checked_in_the_compiling_threads(compiling: Compiling, grammars: HeldGrammars) -> None:
    starts = [ChoiceStart(0, 0, tuple(map(token_of, "123"))), ChoiceStart(1, 1, tuple(map(token_of, "12x")))]
    compiling.submit(with_grammar("good", NUMBER, starts=starts[:1]))
    compiling.submit(with_grammar("bad", NUMBER, starts=starts))
    grammars.allowed.release(2)
    results: dict[str, object] = {}
    while len(results) < 2:
        results |= {request.request_id: matchers for request, matchers in taken(compiling)}
    assert isinstance(results[RequestId("good")], dict)
    assert isinstance(results[RequestId("bad")], GrammarError)


def test_an_aborted_group_does_not_come_back_and_its_id_is_free(compiling: Compiling, grammars: HeldGrammars) -> None:
    first, second = with_grammar("g"), with_grammar("g", WORD)
    compiling.submit(first)
    assert compiling.abort(RequestId("g")) == first
    assert compiling.abort(RequestId("g")) is None
    compiling.submit(second)
    grammars.allowed.release(2)
    compiled: list[tuple[GenerateRequest, Matchers]] = []
    while not compiled:
        compiled = taken(compiling)
    assert [request for request, _ in compiled] == [second]
    assert compiling.take() == []


def test_a_choice_stopped_during_compiling_is_not_submitted(compiling: Compiling, grammars: HeldGrammars) -> None:
    compiling.submit(with_grammar("g", n=3))
    assert compiling.stop_choice(RequestId("g"), 1)
    assert compiling.stop_choice(RequestId("unknown"), 0)
    grammars.allowed.release()
    ((compiled, _),) = taken(compiling)
    assert [start.index for start in compiled.choices] == [0, 2]
    compiling.submit(with_grammar("h"))
    assert not compiling.stop_choice(RequestId("h"), 0)


def test_an_id_that_is_being_compiled_is_in_use(compiling: Compiling) -> None:
    compiling.submit(with_grammar("g"))
    with pytest.raises(RequestError, match="in use"):
        compiling.submit(with_grammar("g", WORD))


def test_a_grammar_that_cannot_be_compiled_ends_its_group_but_not_the_thread(
    compiling: Compiling, grammars: HeldGrammars
) -> None:
    for request, error in ((with_grammar("a", BROKEN), GrammarError), (with_grammar("b", CRASHING), EngineError)):
        for _ in range(3):
            compiling.submit(request)
            grammars.allowed.release()
            ((_, matchers),) = taken(compiling)
            assert isinstance(matchers, error)


def test_a_slow_grammar_does_not_delay_the_next_one(compiling: Compiling, grammars: HeldGrammars) -> None:
    compiling.submit(with_grammar("slow"))
    compiling.submit(with_grammar("next", WORD))
    grammars.allowed.release()
    assert len(taken(compiling)) == 1


def test_only_a_known_grammar_of_fresh_choices_needs_no_compiling(grammars: HeldGrammars) -> None:
    resumed = with_grammar("r", NUMBER, starts=[ChoiceStart(0, 0, (token_of("1"),))])
    assert at_once(grammars, group("free", prompt_of(8)))
    assert not at_once(grammars, with_grammar("g", NUMBER))
    grammars.allowed.release()
    grammars.get(NUMBER)
    assert at_once(grammars, with_grammar("g", NUMBER))
    assert not at_once(grammars, resumed)
