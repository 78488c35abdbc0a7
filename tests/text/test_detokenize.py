"""Tokens become text one at a time."""

import pytest

from motet.text.detokenize import Detokenizer
from motet.text.tokenizer import Tokenizer
from tests.tiny_tokenizer import EOS_ID, FIRST_BYTE_ID, IM_END_ID, build_tiny_tokenizer


def byte_ids(raw: bytes) -> list[int]:
    return [FIRST_BYTE_ID + byte for byte in raw]


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*map(detokenizer.feed, ids), detokenizer.close()]


A, B, E = byte_ids(b"a"), byte_ids(b"b"), byte_ids("é".encode())
SUN, NOTE = byte_ids("日".encode()), byte_ids("🎼".encode())
PAST = build_tiny_tokenizer().get_vocab_size()
"""An id outside the vocabulary."""
PIECES: dict[str, tuple[list[int], list[str]]] = {
    "a character of several tokens comes at once": ([*A, *SUN, *NOTE], ["a", "", "", "日", "", "", "", "🎼", ""]),
    "half a character comes with the end": ([*A, *SUN[:2]], ["a", "", "", "\ufffd"]),
    "special tokens are skipped": ([*A, IM_END_ID, EOS_ID, *B], ["a", "", "", "b", ""]),
    "a character continues after a special token": ([*SUN[:2], EOS_ID, *SUN[2:]], ["", "", "", "日", ""]),
}


@pytest.mark.parametrize("name", PIECES)
def test_text_is_returned_when_its_characters_are_complete(tokenizer: Tokenizer, name: str) -> None:
    ids, texts = PIECES[name]
    assert pieces(Detokenizer(tokenizer), ids) == texts
    assert "".join(texts) == tokenizer.decode(ids)


def test_special_tokens_are_shown_on_request(tokenizer: Tokenizer) -> None:
    shown = pieces(Detokenizer(tokenizer, skip_special_tokens=False), [*A, IM_END_ID, EOS_ID, *B])
    assert shown == ["a", "<|im_end|>", "<|eos|>", "b", ""]


def test_a_replacement_character_that_the_model_generated_is_not_lost(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(Detokenizer(tokenizer), tokenizer.encode("a\ufffdb\ufffd"))) == "a\ufffdb\ufffd"


AFTER: dict[str, tuple[list[int], list[int], str]] = {
    "text": (byte_ids(b"hello"), byte_ids(b"!"), "!"),
    # A `DecodeStream` that starts with half a character repeats all text before it.
    "a byte of a character": ([*A, *NOTE[:1]], [*NOTE[1:], *B], "🎼b"),
    "two bytes of it": ([*A, *NOTE[:2]], [*NOTE[2:], *B], "🎼b"),
    "three bytes of it": ([*A, *NOTE[:3]], [*NOTE[3:], *B], "🎼b"),
    # Invalid bytes before the answer are not repeated.
    "an invalid byte after text": ([*A, *SUN[:1]], B, "b"),
    "invalid bytes before another": (SUN[:2], byte_ids(b"\xff"), "\ufffd"),
    "an invalid byte, and half a character": ([*E[1:], *E[:1]], E[1:], "é"),
    "invalid bytes before an empty answer": (SUN[:2], [], ""),
    "special tokens only": ([EOS_ID, IM_END_ID], A, "a"),
    "more invalid bytes than are used": (byte_ids(b"\xff" * 70), A, "a"),
    "ids outside the vocabulary": ([PAST], [*A, *[PAST] * 40, *B], "ab"),
}


@pytest.mark.parametrize("name", AFTER)
def test_an_answer_continues_the_text_before_it(tokenizer: Tokenizer, name: str) -> None:
    before, ids, text = AFTER[name]
    assert "".join(pieces(Detokenizer(tokenizer, after=before), ids)) == text


def test_the_space_between_prompt_and_answer_is_kept(fallback_tokenizer: Tokenizer) -> None:
    prompt = fallback_tokenizer.encode("a hello")
    answer = fallback_tokenizer.encode("hello a", add_special_tokens=False)
    assert "".join(pieces(Detokenizer(fallback_tokenizer, after=prompt), answer)) == " hello a"
    assert "".join(pieces(Detokenizer(fallback_tokenizer), answer)) == "hello a"


def test_byte_fallback_encodes_characters_that_the_vocabulary_does_not_have(fallback_tokenizer: Tokenizer) -> None:
    text = "a 日本\n🎼 hello"
    ids = fallback_tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces(Detokenizer(fallback_tokenizer), ids)) == fallback_tokenizer.decode(ids) == text


def test_an_invalid_byte_does_not_change_text_that_was_returned(fallback_tokenizer: Tokenizer) -> None:
    """The decoder replaces a complete run of bytes if one of them is invalid, but the newline before it was returned
    already."""
    newline, bad = byte_ids(b"\n"), byte_ids(b"\xe6")
    word = fallback_tokenizer.encode("hello", add_special_tokens=False)
    assert fallback_tokenizer.decode([*newline, *bad, *word]) == "\ufffd\ufffd hello"
    assert "".join(pieces(Detokenizer(fallback_tokenizer), [*newline, *bad, *word, *word])) == "\n\ufffd hello hello"


@pytest.mark.parametrize("length", [15, 16, 17, 32, 100])
@pytest.mark.parametrize("end", [b"", b"!", "日!".encode(), b"\xe6", b"\xe6\x97"])
def test_long_runs_of_invalid_bytes_have_the_same_text_as_when_decoded_at_once(
    tokenizer: Tokenizer, length: int, end: bytes
) -> None:
    for filler in (b"\xff", b"\xe6", b"\xe6\x97", b"\xff\xe6\x97"):
        raw = b"a" + (filler * length)[:length] + end
        assert "".join(pieces(Detokenizer(tokenizer), byte_ids(raw))) == raw.decode(errors="replace")


def test_text_is_returned_during_a_long_run_of_invalid_bytes(tokenizer: Tokenizer) -> None:
    """The library decodes all tokens that it holds at each token, so this limits the work per token."""
    detokenizer = Detokenizer(tokenizer)
    text = "".join(map(detokenizer.feed, byte_ids(b"\xff" * 1000)))
    assert 1000 - len(text) <= 16


def test_one_special_token_can_be_shown_while_others_are_skipped(tokenizer: Tokenizer) -> None:
    ids = [EOS_ID, *byte_ids(b"a"), IM_END_ID, EOS_ID, *byte_ids(b"b"), IM_END_ID]
    visible = frozenset({IM_END_ID})
    assert pieces(Detokenizer(tokenizer, visible=visible), ids) == ["", "a", "<|im_end|>", "", "b", "<|im_end|>", ""]
    shown = pieces(Detokenizer(tokenizer, visible=visible, skip_special_tokens=False), ids)
    assert shown == ["<|eos|>", "a", "<|im_end|>", "<|eos|>", "b", "<|im_end|>", ""]


def test_a_visible_token_splits_a_character(tokenizer: Tokenizer) -> None:
    """The bug: the text of the second half was the complete character, or repeated the text before it."""
    first, rest = byte_ids("日".encode()[:2]), byte_ids("日".encode()[2:])
    ids = [*first, IM_END_ID, *rest, *byte_ids("日".encode())]
    shown = pieces(Detokenizer(tokenizer, visible=frozenset({IM_END_ID})), ids)
    assert shown[:3] == ["", "", "\ufffd<|im_end|>"]
    assert "".join(shown[3:]) == "\ufffd日"


@pytest.mark.parametrize("skip", [True, False])
def test_the_space_after_a_visible_token_is_kept(fallback_tokenizer: Tokenizer, skip: bool) -> None:
    """Decoders drop the first space of a text, and do not count a skipped special token as text before it."""
    words = fallback_tokenizer.encode("hello a", add_special_tokens=False)
    bos, eos = 1, 2
    for after in ([], [eos], [bos], words):
        detokenizer = Detokenizer(fallback_tokenizer, after=after, visible=frozenset({eos}), skip_special_tokens=skip)
        assert "".join(pieces(detokenizer, [eos, *words])) == "</s> hello a"
    resumed = Detokenizer(fallback_tokenizer, after=[eos], visible=frozenset({eos}), skip_special_tokens=skip)
    assert "".join(pieces(resumed, words)) == " hello a"
