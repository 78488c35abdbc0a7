"""Writes texts that a grammar allows, token by token, as a model would that knows nothing."""

from random import Random
from typing import Final

import numpy as np
from numpy.typing import NDArray

from motet.errors import GrammarError
from motet.grammar.compiled import CompiledGrammar, Matcher
from motet.grammar.masks import fill_masks, mask_words
from tests.grammar.models import TOKENIZER, VOCAB_SIZE
from tests.tiny_tokenizer import EOS_ID, FIRST_BYTE_ID

FREE_TOKENS: Final = 40
"""Drawn at random; from then on the end is looked for."""
MAX_TOKENS: Final = 600
PLAIN_SHARE: Final = 0.9
"""How often plain letters are preferred to bytes of longer characters, and to white space."""

QUOTE: Final = FIRST_BYTE_ID + ord('"')
LETTER: Final = FIRST_BYTE_ID + ord("q")
"""May come inside a string only."""
ENDING: Final = (EOS_ID, *(FIRST_BYTE_ID + ord(letter) for letter in '@}]",:ntfSMHYD'))
"""What brings a JSON text nearest to its end, the best first; an address needs its @, a duration a letter behind its
digits."""


def accepts(compiled: CompiledGrammar, text: str) -> bool:
    """Whether a whole answer may be this text."""
    try:
        return compiled.matcher(TOKENIZER.encode(text, add_special_tokens=False)).accepting
    except GrammarError:
        return False


def begins(compiled: CompiledGrammar, text: str) -> bool:
    """Whether an answer may begin with this text."""
    try:
        compiled.matcher(TOKENIZER.encode(text, add_special_tokens=False))
    except GrammarError:
        return False
    return True


def walk(compiled: CompiledGrammar, random: Random) -> str:
    """A whole text."""
    matcher, out = compiled.matcher(), np.zeros((1, mask_words(VOCAB_SIZE)), np.int32)
    written: list[int] = []
    while len(written) < MAX_TOKENS:
        allowed = _allowed(matcher, out)
        token = _drawn(allowed, random) if len(written) < FREE_TOKENS else _ending(allowed, random)
        if token == EOS_ID:
            return TOKENIZER.decode(written)
        matcher.consume(token)
        written.append(token)
    raise AssertionError(f"no end in sight: {TOKENIZER.decode(written)}")


def _allowed(matcher: Matcher, out: NDArray[np.int32]) -> list[int]:
    assert fill_masks([matcher], out) == {}
    bits = np.unpackbits(out.view(np.uint8)[0], bitorder="little")[:VOCAB_SIZE]
    return [int(token) for token in np.flatnonzero(bits)]


def _drawn(allowed: list[int], random: Random) -> int:
    plain = [token for token in allowed if FIRST_BYTE_ID + 0x20 < token < FIRST_BYTE_ID + 0x7F]
    return random.choice(plain if plain and random.random() < PLAIN_SHARE else allowed)


def _ending(allowed: list[int], random: Random) -> int:
    if QUOTE in allowed and LETTER in allowed:
        return QUOTE
    found = [token for token in ENDING if token in allowed]
    return found[0] if found else _drawn(allowed, random)
