"""Text in which some special tokens are visible, token by token, against the complete text decoded at once."""

from hypothesis import given
from hypothesis import strategies as st

from motet.text.detokenize import Detokenizer
from motet.text.tokenizer import Tokenizer
from tests.tiny_tokenizer import FIRST_BYTE_ID, build_byte_fallback_tokenizer, build_tiny_tokenizer

BYTE_LEVEL = Tokenizer(build_tiny_tokenizer())
BYTE_FALLBACK = Tokenizer(build_byte_fallback_tokenizer())

SPECIAL = st.integers(0, 2)
VISIBLE = st.frozensets(SPECIAL)
BYTES = st.integers(FIRST_BYTE_ID, FIRST_BYTE_ID + 255).map(lambda token_id: (token_id,))
CHARACTERS = st.sampled_from("é日🎼a ").map(lambda char: tuple(FIRST_BYTE_ID + byte for byte in char.encode()))
WORDS = st.integers(FIRST_BYTE_ID + 256, BYTE_LEVEL.vocab_size - 1).map(lambda token_id: (token_id,))


def tokens(*kinds: st.SearchStrategy[tuple[int, ...]]) -> st.SearchStrategy[tuple[int, ...]]:
    one = st.one_of(SPECIAL.map(lambda token_id: (token_id,)), WORDS, *kinds)
    return st.lists(one, max_size=8).map(lambda parts: tuple(i for part in parts for i in part))


def shown(
    tokenizer: Tokenizer, past: tuple[int, ...], ids: tuple[int, ...], visible: frozenset[int], skip: bool
) -> str:
    detokenizer = Detokenizer(tokenizer, after=past, visible=visible, skip_special_tokens=skip)
    return "".join(map(detokenizer.feed, ids)) + detokenizer.close()


def decoded(tokenizer: Tokenizer, ids: tuple[int, ...], visible: frozenset[int], skip: bool) -> str:
    skipped = tokenizer.special_ids - visible if skip else frozenset[int]()
    return tokenizer.decode([i for i in ids if i not in skipped], skip_special_tokens=False)


@given(tokens(BYTES, CHARACTERS), tokens(BYTES, CHARACTERS), VISIBLE, st.booleans())
def test_an_answer_with_visible_tokens_continues_its_prompt(
    past: tuple[int, ...], ids: tuple[int, ...], visible: frozenset[int], skip: bool
) -> None:
    text = shown(BYTE_LEVEL, past, ids, visible, skip)
    known = decoded(BYTE_LEVEL, past, visible, skip)
    assert decoded(BYTE_LEVEL, past + ids, visible, skip) in (known + text, known.removesuffix("\ufffd") + text)


@given(tokens(CHARACTERS), tokens(CHARACTERS), VISIBLE, st.booleans())
def test_an_answer_with_visible_tokens_keeps_the_space_that_decoders_drop(
    past: tuple[int, ...], ids: tuple[int, ...], visible: frozenset[int], skip: bool
) -> None:
    text = shown(BYTE_FALLBACK, past, ids, visible, skip)
    assert decoded(BYTE_FALLBACK, past + ids, visible, skip) == decoded(BYTE_FALLBACK, past, visible, skip) + text
