"""Limits on the work for one grammar: when it is compiled, and at every token.

llguidance counts work in units of its own. Two things are limited here before it gets a grammar: work that it does not
count, and depth that would overflow its stack. It recurses over rules and references, and a stack overflow in Rust ends
the whole process.
"""

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from llguidance import LLParserLimits

from motet.types import Grammar, GrammarKind

MAX_SOURCE_CHARS: Final = 256 * 1024
"""Most characters of a schema, a grammar or a list of choices."""

MAX_TEXT_CHARS: Final = 8 * 1024
"""Most characters of a regular expression, a choice, or a string in a schema: work grows with their square."""

MAX_NESTING: Final = 100
"""Most objects and arrays inside one another in a schema; llguidance's JSON parser stops at 128."""

MAX_LEVELS: Final = 500
"""Most levels of recursion: rules of a grammar and the groups in them, or a schema and the parts it refers to."""

MAX_OPTIONAL: Final = 400
"""Most optional properties of one object: any of them may come next, which takes four items of a row for each."""

MAX_MULTIPLES: Final = 10_000
"""Largest sum of `multipleOf` in all schemas of a grammar: llguidance goes through the remainders when it compiles, and
keeps them. 10,000 take up to 50 ms and 10 MB, 100,000 a second and 50 MB, a million 25 s and 390 MB. Several that
may apply to one value can take minutes, which no limit of its own ends."""

MAX_DECIMALS: Final = 8
"""Most decimal places of `multipleOf`: with more, llguidance's 32-bit numbers overflow."""

PARSER_LIMITS: Final = LLParserLimits(
    max_items_in_row=2_000,
    step_max_items=5_000,
    step_lexer_fuel=30_000,
    max_lexer_states=20_000,
    verbose_errors=False,
)
"""llguidance's limits for one token of one choice: a millisecond at worst, so that 128 choices cannot delay a step for
long. Time grows faster than items: 50,000 take up to 170 ms. `MAX_OPTIONAL` needs up to 2,000, most schemas under 500.

States of the lexer are kept for each choice by itself. 20,000 take 2 MB; an answer of 2,000 tokens could make 250,000,
which is llguidance's own limit."""

LIGHT_CHARS: Final = {
    GrammarKind.JSON: 16 * 1024,
    GrammarKind.LARK: 16 * 1024,
    GrammarKind.CHOICE: 32 * 1024,
    GrammarKind.REGEX: 512,
}
"""Most characters of a light grammar."""
LIGHT_WORDS: Final = 8
"""Most words of `WORDS` in a light grammar."""
WORDS: Final = ('"pattern"', '"format"', '"multipleOf"', '"allOf"', "%regex")
"""Words for work that may grow faster than the text: all that hold for one text are combined with one another."""

HEAVY_MB: Final = 64
"""Memory that a heavy grammar may keep when it is compiled; most keep one or two."""

STACK_BYTES: Final = 256 * 1024 * 1024
"""Stack of a thread that compiles; only touched pages take memory."""

_starting = threading.Lock()
T = TypeVar("T")


def is_heavy(grammar: Grammar) -> bool:
    """Returns True unless compiling takes little for certain: at most a few tenths of a second, and 10 MB."""
    source, kind = grammar.source, grammar.kind
    if len(source) > LIGHT_CHARS[kind]:
        return True
    if kind is GrammarKind.CHOICE:
        return False
    words = sum(source.count(word) for word in WORDS)
    # An escape may hide a word in JSON; `&` and `~` combine expressions in the other languages.
    hidden = "\\u" in source if kind is GrammarKind.JSON else any(sign in source for sign in ("\\u", "&", "~"))
    return hidden or words > LIGHT_WORDS or '"patternProperties"' in source


def kept_mb(grammar: Grammar) -> int:
    """Returns a bound on the memory that a grammar keeps when it is compiled, rounded up."""
    if is_heavy(grammar):
        return HEAVY_MB
    return 1 + len(grammar.source) // 4096 + (5 if "multipleOf" in grammar.source else 0)


def with_deep_stack(work: Callable[[], T]) -> T:
    """Runs `work`, which must not raise, in a thread whose stack is far deeper than `MAX_LEVELS` needs."""
    done: list[T] = []
    thread = threading.Thread(target=lambda: done.append(work()), name="motet-grammar", daemon=True)
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return done[0]
