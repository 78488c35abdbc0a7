"""Generates texts that a grammar allows, token by token, as a model with random weights would."""

from collections.abc import Sequence
from random import Random
from typing import Final

from motet.errors import GrammarError
from motet.grammar.compiled_grammar import CompiledGrammar, Matcher
from tests.grammar.models import TOKENIZER, allowed
from tests.tiny_tokenizer import EOS_ID, FIRST_BYTE_ID

FREE_TOKENS: Final = 40
"""Number of random tokens, after which a walk chooses tokens that lead to the end."""
MAX_TOKENS: Final = 600
PLAIN_SHARE: Final = 0.9
"""Share of the random tokens for which plain letters are preferred to white space and to bytes of longer characters."""
ENDING_SHARE: Final = 0.25
"""Probability of a text that leads to the end, in place of a token."""

QUOTE: Final = FIRST_BYTE_ID + ord('"')
LETTER: Final = FIRST_BYTE_ID + ord("q")
"""A letter that is allowed only inside a string."""
CLOSING: Final = (EOS_ID, *(FIRST_BYTE_ID + ord(letter) for letter in '@}]",:ntfSMHYD'))
"""Tokens that lead to the end of a JSON text, the best ones first. An email address needs its @, a duration a letter
after its digits."""


def accepts(compiled: CompiledGrammar, text: str) -> bool:
    """Returns True if this text is a complete answer that the grammar allows."""
    matcher = _matcher_after(compiled, text)
    return matcher is not None and matcher.inner.is_accepting()


def can_start(compiled: CompiledGrammar, text: str) -> bool:
    """Returns True if an answer that the grammar allows can start with this text."""
    return _matcher_after(compiled, text) is not None


def _matcher_after(compiled: CompiledGrammar, text: str) -> Matcher | None:
    try:
        return compiled.matcher(TOKENIZER.encode(text, add_special_tokens=False))
    except GrammarError:
        return None


def walk(compiled: CompiledGrammar, random: Random, *, ends: Sequence[str] = ()) -> str:
    """Returns a random complete text that the grammar allows. `ends`: texts that lead to its end, as tags do."""
    matcher = compiled.matcher()
    tokens: list[int] = []
    endings = [TOKENIZER.encode(end, add_special_tokens=False) for end in ends]
    while len(tokens) < MAX_TOKENS:
        if (
            endings and len(tokens) >= FREE_TOKENS and random.random() < ENDING_SHARE
        ):  # it can be inside a string of JSON
            ending = next((ids for ids in endings if matcher.inner.validate_tokens(ids) == len(ids)), [])
            matcher.inner.consume_tokens(ending)
            tokens += ending
            continue
        token = (_random_token if len(tokens) < FREE_TOKENS else _closing_token)(allowed(matcher), random)
        if token == EOS_ID:
            return TOKENIZER.decode(tokens)
        matcher.consume(token)
        tokens.append(token)
    raise AssertionError(f"the walk does not reach an end: {TOKENIZER.decode(tokens)}")


def _random_token(allowed_ids: list[int], random: Random) -> int:
    plain = [token for token in allowed_ids if FIRST_BYTE_ID + 0x20 < token < FIRST_BYTE_ID + 0x7F]
    return random.choice(plain if plain and random.random() < PLAIN_SHARE else allowed_ids)


def _closing_token(allowed_ids: list[int], random: Random) -> int:
    if QUOTE in allowed_ids and LETTER in allowed_ids:
        return QUOTE
    found = [token for token in CLOSING if token in allowed_ids]
    return found[0] if found else _random_token(allowed_ids, random)
