"""Limits on the work for one grammar: when it is compiled, and at every token.

llguidance has its own limits, in its own units (`PARSER_LIMITS`). The other limits apply before llguidance gets a
grammar. They concern work that it does not count, and depth that would overflow its stack: it recurses over rules and
references, and a stack overflow in Rust ends the process.

A grammar is *light* if its text guarantees that compiling it is cheap, otherwise *heavy*. Heavy grammars are compiled
in a separate process first (`trial`).
"""

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from llguidance import LLParserLimits

from motet.errors import GrammarError
from motet.types import Grammar, GrammarKind

MAX_SOURCE_CHARS: Final = 256 * 1024
"""Maximum number of characters of a schema, a grammar or a list of choices."""
MAX_TEXT_CHARS: Final = 8 * 1024
"""Maximum number of characters of a regular expression, a choice, or a string in a schema. The work grows with the
square of this number."""
MAX_NESTING: Final = 100
"""Maximum depth of nested objects and arrays in a schema. llguidance's JSON parser stops at 128."""
MAX_LEVELS: Final = 500
"""Maximum number of levels of recursion: rules of a grammar and the groups in them, or the depths of a schema and of
the schemas that it refers to."""
MAX_SCHEMAS: Final = 20_000
"""Maximum number of schemas inside a schema."""
MAX_OPTIONAL: Final = 400
"""Maximum number of optional properties of one object. Any of them can come next, which takes four parser items
each."""
MAX_MULTIPLES: Final = 10_000
"""Maximum sum of `multipleOf` in all schemas of a grammar. llguidance enumerates the remainders when it compiles, and
keeps them: 10,000 take up to 50 ms and 10 MB, 100,000 a second and 50 MB, a million 25 s and 390 MB. Several numbers
that apply to the same value can take minutes, and none of llguidance's limits ends this."""
MAX_DECIMALS: Final = 8
"""Maximum number of decimal places of `multipleOf`. With more, llguidance's 32-bit numbers overflow."""

PARSER_LIMITS: Final = LLParserLimits(
    max_items_in_row=2_000,
    step_max_items=50_000,
    step_lexer_fuel=200_000,
    max_lexer_states=20_000,
    verbose_errors=False,
)
"""llguidance's limits for one token of one choice. They are high enough for every schema that people have (12 ms for
the slowest token), and end what takes seconds. What is left of the time is limited by `MAX_TOKEN_S`.

The choices of a grammar share lexer states; 20,000 of them take 2 MB. When they are full, choices get a new lexer."""
MAX_TOKEN_S: Final = 0.1
"""Maximum CPU time for one token of one choice, in seconds. The time for an ambiguous grammar grows with the length of
the answer: 210 tokens of `a: a a a | "x"` take 0.1 s each."""

LIGHT_CHARS: Final = {
    GrammarKind.JSON: 16 * 1024,
    GrammarKind.LARK: 16 * 1024,
    GrammarKind.CHOICE: 32 * 1024,
    GrammarKind.REGEX: 512,
}
"""Maximum number of characters of a light grammar."""
LIGHT_KEYWORDS: Final = 8
"""Maximum number of `COSTLY_KEYWORDS` in a light grammar."""
COSTLY_KEYWORDS: Final = ('"pattern"', '"format"', '"multipleOf"', '"allOf"', "%regex")
"""Keywords whose work can grow faster than the text: llguidance combines all constraints that apply to one string."""
EXPANDED_KEYWORDS: Final = ('"not"', '"if"', '"oneOf"', '"dependent', '"dependencies"', '"uniqueItems"')
"""Keywords of schemas that are replaced by longer ones, in the worst case by a product of all of them."""
LIGHT_EXPANDED: Final = 4
"""Maximum number of `EXPANDED_KEYWORDS` in a light schema."""
HEAVY_MB: Final = 64
"""Maximum memory of a compiled heavy grammar in MB. Most take one or two."""
STACK_BYTES: Final = 256 * 1024 * 1024
"""Stack of a thread that compiles. Only pages that are used take memory."""

_starting = threading.Lock()
"""Held while a thread starts, since the stack size is a setting of the process."""
T = TypeVar("T")


def check_length(text: str, maximum: int = MAX_TEXT_CHARS) -> None:
    """Raises `GrammarError` for a text with more characters."""
    if len(text) > maximum:
        raise GrammarError(f"it has {len(text)} characters; at most {maximum} are allowed")


def check_source(grammar: Grammar) -> None:
    """Raises `GrammarError` for a grammar with too many characters."""
    check_length(grammar.source, MAX_TEXT_CHARS if grammar.kind is GrammarKind.REGEX else MAX_SOURCE_CHARS)


def is_heavy(grammar: Grammar) -> bool:
    """Returns True unless the text guarantees that compiling is cheap: at most a few tenths of a second, and 10 MB."""
    source, kind = grammar.source, grammar.kind
    if len(source) > LIGHT_CHARS[kind]:
        return True
    if kind is GrammarKind.CHOICE:
        return False
    keywords = sum(source.count(keyword) for keyword in COSTLY_KEYWORDS)
    # An escape can hide a keyword in JSON; `&` and `~` combine expressions in the other languages.
    hidden = "\\u" in source if kind is GrammarKind.JSON else any(sign in source for sign in ("\\u", "&", "~"))
    expanded = sum(source.count(keyword) for keyword in EXPANDED_KEYWORDS)
    return hidden or keywords > LIGHT_KEYWORDS or expanded > LIGHT_EXPANDED or '"patternProperties"' in source


def compiled_mb(grammar: Grammar) -> int:
    """Returns an upper bound of the memory of a compiled grammar in MB."""
    if is_heavy(grammar):
        return HEAVY_MB
    return 1 + len(grammar.source) // 4096 + (5 if "multipleOf" in grammar.source else 0)


def with_deep_stack(work: Callable[[], T]) -> T:
    """Runs `work`, which must not raise, in a thread whose stack is much larger than `MAX_LEVELS` requires."""
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
