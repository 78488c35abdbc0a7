"""A heavy grammar is compiled in a process first, which ends when it exceeds a limit."""

import json
import re
import sys
from contextlib import nullcontext

import msgspec
import pytest
from tokenizers import Tokenizer as Backend

from motet.errors import GrammarError
from motet.grammar import trial
from motet.grammar.limits import HEAVY_MB, MAX_SOURCE_CHARS, MAX_TEXT_CHARS, compiled_mb, is_heavy
from motet.system.machine import process_memory
from motet.text.tokenizer import Tokenizer, vocabulary_kind
from motet.types import Grammar, GrammarKind
from tests.grammar.models import TOKENIZER, VOCAB_SIZE, grammars_of, lark, regex
from tests.tiny_tokenizer import EOS_ID, build_tiny_tokenizer


def schema(**fields: object) -> Grammar:
    return Grammar(GrammarKind.JSON, json.dumps(fields))


def both(*patterns: str) -> Grammar:
    return schema(allOf=[{"type": "string", "pattern": pattern} for pattern in patterns])


ENDLESS = both(*(f"a{i}|b{i}" for i in range(40)))
"""A grammar whose compilation has never been observed to end."""
LARGE = schema(enum=[f"value number {i}" for i in range(9000)])
LARGE_WAIT = "lambda _, grammar: grammar.source == 'a' or (b'x' * 2**30, __import__('time').sleep(60))"
"""A function that uses 1 GiB of memory, and then waits in place of compiling. The vocabulary needs none."""
NO_LIMITS = "import motet.system.process_limits; motet.system.process_limits.resource = None"
NO_REPORT = "import psutil; psutil.Process = lambda: (_ for _ in ()).throw(FileNotFoundError('/proc'))"


@pytest.mark.parametrize(
    ("grammar", "heavy"),
    [
        (schema(type="object", properties={"a": {"type": "string", "pattern": "^[a-z]+$"}}), False),
        (both(*"abc"), False),
        (schema(description="a pattern of another format " * 20), False),
        (regex("[a-z]{1,50}"), False),
        (Grammar(GrammarKind.CHOICE, json.dumps(["&"] * 2000)), False),
        (ENDLESS, True),
        (LARGE, True),
        (schema(patternProperties={"^a": {}}), True),
        (schema(oneOf=[{"type": "null"}, {"not": {"const": 1}}]), False),
        (schema(items=[{"not": {"const": 1}}] * 5), True),
        (Grammar(GrammarKind.JSON, r'{"\u0070atternProperties": {"^a": {}}}'), True),
        (lark("start: A\nA: /a+/ & ~/b/"), True),
        (regex("a" * 600), True),
    ],
)
def test_a_grammar_is_light_only_if_its_text_guarantees_little_work(grammar: Grammar, heavy: bool) -> None:
    assert is_heavy(grammar) is heavy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grammar", "limit", "error"),
    [
        (LARGE, "", None),
        (schema(anyOf=[{"type": "text"}], title="t" * 20_000), "", "at anyOf[0].type: 'text' is not a type"),
        pytest.param(ENDLESS, "trial.CPU_S = 0", trial.TOO_LONG, marks=pytest.mark.slow),
        pytest.param(LARGE, "trial.HEAVY_MB = 1", "its compiled form takes ", marks=pytest.mark.slow),
        pytest.param(
            LARGE,
            "import mmap; trial.Grammars.get = lambda *_: bytearray(mmap.mmap(-1, 2**30)[:1])",
            "compiling it takes more than 512 MB",
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(*case, marks=mark)
            for hidden, mark in ((NO_LIMITS, pytest.mark.slow), (NO_REPORT, pytest.mark.long))
            for case in (
                (LARGE, hidden, None),
                (ENDLESS, f"{hidden}; trial.CPU_S = 0", trial.TOO_LONG),
                (LARGE, f"{hidden}; trial.Grammars.get = {LARGE_WAIT}", "compiling it takes more than 512 MB"),
            )
        ),
    ],
)
def test_the_process_reports_the_error_or_is_ended(
    grammar: Grammar, limit: str, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`limit`: code that changes limits in the process."""
    code = f"from motet.grammar import trial\n{limit}\ntrial.main()"
    monkeypatch.setattr(trial, "COMMAND", (sys.executable, "-c", code))
    with pytest.raises(GrammarError, match=f"^{re.escape(error)}") if error else nullcontext():
        trial.compile_in_process(grammar, TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_ID,))


@pytest.mark.parametrize(
    "grammar", [regex("a" * (MAX_TEXT_CHARS + 1)), lark("#" * (MAX_SOURCE_CHARS + 1)), schema(title="t" * 300_000)]
)
def test_no_process_starts_for_a_text_that_is_too_long(grammar: Grammar, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: such grammars of one client took a second each, and all other grammars waited."""
    monkeypatch.setattr(trial, "COMMAND", ("no such program",))
    with pytest.raises(GrammarError, match=r"characters; at most \d+ are allowed"):
        trial.compile_in_process(grammar, TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_ID,))


def test_the_tokenizer_is_written_as_json_once() -> None:
    """Regression: each heavy grammar stopped the event loop for 20 ms, or 100 ms with a large vocabulary."""
    tokenizer = Tokenizer(build_tiny_tokenizer())
    assert tokenizer.json is tokenizer.json
    assert vocabulary_kind(Backend.from_str(tokenizer.json)) is vocabulary_kind(tokenizer.backend)


@pytest.mark.slow
def test_the_memory_of_the_cache_is_limited() -> None:
    grammars = grammars_of(max_cached_mb=HEAVY_MB + 1)
    light = [regex(letter) for letter in "abc"]
    for grammar in light:
        grammars.get(grammar)
    grammars.get(LARGE)
    assert [grammars.cached(grammar) is None for grammar in (*light, LARGE)] == [True, True, False, False]
    grammars.evict(LARGE)
    for number in range(HEAVY_MB):
        grammars.get(regex(f"d{number}"))
    assert grammars.cached(light[-1]) is not None


NAMES = [f"property number {i}" for i in range(200)]
WIDE = schema(type="object", properties={name: {"type": "number"} for name in NAMES}, required=NAMES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "grammar", [schema(type="integer", multipleOf=9973), WIDE, lark("start: A\nA: /[a-z]{1,400}/")]
)
def test_a_light_grammar_takes_no_more_memory_than_estimated(grammar: Grammar) -> None:
    grammars = grammars_of()
    grammars.get(regex("a"))
    before_mb = process_memory().resident_bytes >> 20
    for number in range(4):
        grammars.get(msgspec.structs.replace(grammar, source=grammar.source + " " * number))
    assert not is_heavy(grammar)
    assert (process_memory().resident_bytes >> 20) - before_mb <= 4 * compiled_mb(grammar)
