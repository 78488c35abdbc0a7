"""Makes grammars over the tiny vocabulary, and returns the tokens that their matchers allow."""

import numpy as np

from motet.grammar.compiled_grammar import Grammars, Matcher, fill_masks, mask_words
from motet.text.tokenizer import Tokenizer
from motet.types import Grammar, GrammarKind, Thinking
from tests.tiny_tokenizer import EOS_ID, build_tiny_tokenizer

TOKENIZER = Tokenizer(build_tiny_tokenizer())
VOCAB_SIZE = TOKENIZER.vocab_size


def grammars_of(
    *, vocab_size: int = VOCAB_SIZE, eos_token_ids: tuple[int, ...] = (EOS_ID,), max_cached_mb: int = 512
) -> Grammars:
    return Grammars(lambda: TOKENIZER, vocab_size=vocab_size, eos_token_ids=eos_token_ids, max_cached_mb=max_cached_mb)


def lark(source: str, thinking: Thinking | None = None) -> Grammar:
    return Grammar(GrammarKind.LARK, source, thinking)


def regex(source: str, thinking: Thinking | None = None) -> Grammar:
    return Grammar(GrammarKind.REGEX, source, thinking)


def json(source: str, thinking: Thinking | None = None) -> Grammar:
    return Grammar(GrammarKind.JSON, source, thinking)


def allowed(matcher: Matcher, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Returns the ids of the tokens that can come next."""
    out = np.zeros((1, mask_words(vocab_size)), np.int32)
    assert fill_masks([matcher], out) == {}
    bits = np.unpackbits(out.view(np.uint8)[0], bitorder="little")[:vocab_size]
    return [int(token) for token in np.flatnonzero(bits)]


def allowed_texts(matcher: Matcher) -> set[str]:
    """Returns the texts of the tokens that can come next."""
    return {TOKENIZER.token_text(token) for token in allowed(matcher)}


def follows(grammars: Grammars, grammar: Grammar, text: str) -> bool:
    """Returns True if this text is a complete answer that the grammar allows. Special tokens in it count as tokens."""
    matcher = grammars.get(grammar).matcher()
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        if token not in allowed(matcher):
            return False
        matcher.consume(token)
    return matcher.inner.is_accepting()
