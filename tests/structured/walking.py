"""Writes texts that a grammar allows, token by token, as a model that knows nothing would."""

from random import Random
from typing import Final

from motet.errors import GrammarError
from motet.grammar.compiled_grammar import CompiledGrammar, Matcher
from tests.grammar.models import TOKENIZER, allowed
from tests.tiny_tokenizer import EOS_ID, FIRST_BYTE_ID

FREE_TOKENS: Final = 40
"""Number of tokens drawn at random before a walk heads for the end."""
MAX_TOKENS: Final = 600
PLAIN_SHARE: Final = 0.9
"""Share of draws in which plain letters are preferred to white space and to bytes of longer characters."""

QUOTE: Final = FIRST_BYTE_ID + ord('"')
LETTER: Final = FIRST_BYTE_ID + ord("q")
"""A letter that is allowed only inside a string."""
ENDING: Final = (EOS_ID, *(FIRST_BYTE_ID + ord(letter) for letter in '@}]",:ntfSMHYD'))
"""Tokens that bring a JSON text nearest to its end, the best first; an address needs its @, a duration a letter after
its digits."""


def accepts(compiled: CompiledGrammar, text: str) -> bool:
    """Returns True if a whole answer may be this text."""
    matcher = _behind(compiled, text)
    return matcher is not None and matcher.inner.is_accepting()


def begins(compiled: CompiledGrammar, text: str) -> bool:
    """Returns True if an answer may begin with this text."""
    return _behind(compiled, text) is not None


def _behind(compiled: CompiledGrammar, text: str) -> Matcher | None:
    try:
        return compiled.matcher(TOKENIZER.encode(text, add_special_tokens=False))
    except GrammarError:
        return None


def walk(compiled: CompiledGrammar, random: Random) -> str:
    """Returns a random text that the grammar allows, from its beginning to its end."""
    matcher = compiled.matcher()
    written: list[int] = []
    while len(written) < MAX_TOKENS:
        token = (_drawn if len(written) < FREE_TOKENS else _ending)(allowed(matcher), random)
        if token == EOS_ID:
            return TOKENIZER.decode(written)
        matcher.consume(token)
        written.append(token)
    raise AssertionError(f"no end in sight: {TOKENIZER.decode(written)}")


def _drawn(may_come: list[int], random: Random) -> int:
    plain = [token for token in may_come if FIRST_BYTE_ID + 0x20 < token < FIRST_BYTE_ID + 0x7F]
    return random.choice(plain if plain and random.random() < PLAIN_SHARE else may_come)


def _ending(may_come: list[int], random: Random) -> int:
    if QUOTE in may_come and LETTER in may_come:
        return QUOTE
    found = [token for token in ENDING if token in may_come]
    return found[0] if found else _drawn(may_come, random)
