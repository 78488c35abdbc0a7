"""How much work one grammar may be: when it is compiled, and at every token.

llguidance counts work in units of its own; what it does not count, and what would overflow its stack (it recurses over
rules and references, and a Rust program whose stack overflows is gone, with everything in its process), is bounded
here before it gets to see it.
"""

import threading
from collections.abc import Callable
from typing import Final

from llguidance import LLParserLimits

MAX_SOURCE_CHARS: Final = 256 * 1024
"""Of a schema, a grammar or a list of choices."""

MAX_TEXT_CHARS: Final = 8 * 1024
"""Of one regular expression, one choice, or one string that a schema or a grammar wants: work grows with its square."""

MAX_NESTING: Final = 100
"""Objects and arrays inside one another in a schema; llguidance's JSON parser ends at 128."""

MAX_LEVELS: Final = 500
"""Of recursion: the rules of a grammar and how deep each nests, a schema and each part that is referred to."""

MAX_OPTIONAL: Final = 400
"""Properties of one object that may be left out: any of them may come next, which is four items of a row each."""

MAX_ITEMS_IN_ROW: Final = 2_000
STEP_MAX_ITEMS: Final = 5_000
STEP_LEXER_FUEL: Final = 30_000
"""Of one token of one choice: a millisecond each, at worst, so that 128 choices cannot keep a step waiting for long.
Work grows faster than items: 50,000 take up to 170 ms. `MAX_OPTIONAL` needs up to 2,000, most schemas under 500."""

STACK_BYTES: Final = 256 * 1024 * 1024
"""Of the threads that compile; only touched pages take memory."""


def parser_limits() -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=MAX_ITEMS_IN_ROW,
        step_max_items=STEP_MAX_ITEMS,
        step_lexer_fuel=STEP_LEXER_FUEL,
        verbose_errors=False,
    )


_starting = threading.Lock()


def with_deep_stack(work: Callable[[], None]) -> None:
    """Runs `work`, which must not raise, in a thread whose stack is far deeper than `MAX_LEVELS` needs."""
    thread = threading.Thread(target=work, name="motet-grammar", daemon=True)
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
