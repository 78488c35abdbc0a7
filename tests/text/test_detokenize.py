"""Text from tokens, one at a time."""

import pytest

from motet.text.detokenize import Detokenizer
from motet.text.tokenizer import Tokenizer
from tests.tiny_tokenizer import EOS_ID, FIRST_BYTE_ID, IM_END_ID


def byte_ids(raw: bytes) -> list[int]:
    return [FIRST_BYTE_ID + byte for byte in raw]


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*map(detokenizer.feed, ids), detokenizer.close()]


def test_a_character_of_several_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    assert pieces(Detokenizer(tokenizer), byte_ids("a日🎼".encode())) == ["a", "", "", "日", "", "", "", "🎼", ""]


def test_closing_gives_what_did_not_become_a_character(tokenizer: Tokenizer) -> None:
    assert pieces(Detokenizer(tokenizer), byte_ids(b"a\xe6\x97")) == ["a", "", "", "\ufffd"]


def test_a_replacement_character_that_was_meant_is_not_lost(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(Detokenizer(tokenizer), tokenizer.encode("a\ufffdb\ufffd"))) == "a\ufffdb\ufffd"


def test_bad_bytes_are_replaced_as_in_the_whole_text(tokenizer: Tokenizer) -> None:
    raw = b"a\xff\xfeb\xe6\x97c"
    assert "".join(pieces(Detokenizer(tokenizer), byte_ids(raw))) == raw.decode(errors="replace")


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    ids = [*byte_ids(b"a"), IM_END_ID, EOS_ID, *byte_ids(b"b")]
    assert pieces(Detokenizer(tokenizer), ids) == ["a", "", "", "b", ""]
    assert pieces(Detokenizer(tokenizer, skip_special_tokens=False), ids) == ["a", "<|im_end|>", "<|eos|>", "b", ""]


def test_a_character_goes_on_behind_a_special_token_that_is_skipped(tokenizer: Tokenizer) -> None:
    ids = [*byte_ids("日".encode()[:2]), EOS_ID, *byte_ids("日".encode()[2:])]
    assert pieces(Detokenizer(tokenizer), ids) == ["", "", "", "日", ""]
    assert tokenizer.decode(ids) == "日"


def test_ids_past_the_vocabulary_have_no_text_and_do_no_harm(tokenizer: Tokenizer) -> None:
    past = tokenizer.vocab_size
    assert "".join(pieces(Detokenizer(tokenizer), [past, *byte_ids(b"a"), *[past] * 40, *byte_ids(b"b")])) == "ab"


def test_text_continues_after_what_came_before(tokenizer: Tokenizer) -> None:
    assert pieces(Detokenizer(tokenizer, after=tokenizer.encode("hello")), byte_ids(b"!")) == ["!", ""]


@pytest.mark.parametrize("cut", range(1, 4))
def test_a_character_begun_before_is_completed(tokenizer: Tokenizer, cut: int) -> None:
    """A `DecodeStream` primed with a cut character gives all of the text before once more."""
    before, rest = byte_ids("ab🎼".encode()[: 2 + cut]), byte_ids("🎼!".encode()[cut:])
    assert "".join(pieces(Detokenizer(tokenizer, after=before), rest)) == "🎼!"


def test_bad_bytes_at_the_end_of_the_past_are_not_told_again(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(Detokenizer(tokenizer, after=byte_ids(b"a\xe6")), byte_ids(b"b"))) == "b"
    assert "".join(pieces(Detokenizer(tokenizer, after=byte_ids(b"\xe6\x97")), byte_ids(b"\xff"))) == "\ufffd"
    assert "".join(pieces(Detokenizer(tokenizer, after=byte_ids(b"\xa9\xc3")), byte_ids(b"\xa9"))) == "é"
    assert "".join(pieces(Detokenizer(tokenizer, after=byte_ids(b"\xe6\x97")), [])) == ""


def test_a_past_without_any_text_is_no_past(tokenizer: Tokenizer) -> None:
    assert pieces(Detokenizer(tokenizer, after=[EOS_ID, IM_END_ID]), byte_ids(b"a")) == ["a", ""]
    assert "".join(pieces(Detokenizer(tokenizer, after=byte_ids(b"\xff" * 70)), byte_ids(b"a"))) == "a"


def test_the_space_between_prompt_and_answer_is_kept(fallback_tokenizer: Tokenizer) -> None:
    prompt = fallback_tokenizer.encode("a hello")
    answer = fallback_tokenizer.encode("hello a", add_special_tokens=False)
    assert "".join(pieces(Detokenizer(fallback_tokenizer, after=prompt), answer)) == " hello a"
    assert "".join(pieces(Detokenizer(fallback_tokenizer), answer)) == "hello a"


def test_byte_fallback_writes_characters_the_vocabulary_lacks(fallback_tokenizer: Tokenizer) -> None:
    text = "a 日本\n🎼 hello"
    ids = fallback_tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces(Detokenizer(fallback_tokenizer), ids)) == fallback_tokenizer.decode(ids) == text


def test_a_bad_byte_does_not_take_back_text_that_was_given(fallback_tokenizer: Tokenizer) -> None:
    """The decoder spoils a whole run of bytes for one bad one; the newline before was shown already."""
    newline, bad = byte_ids(b"\n"), byte_ids(b"\xe6")
    word = fallback_tokenizer.encode("hello", add_special_tokens=False)
    assert fallback_tokenizer.decode([*newline, *bad, *word]) == "\ufffd\ufffd hello"
    assert "".join(pieces(Detokenizer(fallback_tokenizer), [*newline, *bad, *word, *word])) == "\n\ufffd hello hello"


@pytest.mark.parametrize("length", [15, 16, 17, 32, 100])
@pytest.mark.parametrize("end", [b"", b"!", "日!".encode(), b"\xe6", b"\xe6\x97"])
def test_long_runs_of_bad_bytes_read_as_in_the_whole_text(tokenizer: Tokenizer, length: int, end: bytes) -> None:
    for filler in (b"\xff", b"\xe6", b"\xe6\x97", b"\xff\xe6\x97"):
        raw = b"a" + (filler * length)[:length] + end
        assert "".join(pieces(Detokenizer(tokenizer), byte_ids(raw))) == raw.decode(errors="replace")


def test_text_is_given_during_a_long_run_of_bad_bytes(tokenizer: Tokenizer) -> None:
    """So the work a token stays bounded: the library decodes all that it holds at each step."""
    detokenizer = Detokenizer(tokenizer)
    given = "".join(map(detokenizer.feed, byte_ids(b"\xff" * 1000)))
    assert 1000 - len(given) <= 16


def test_a_special_token_may_be_shown_though_others_are_skipped(tokenizer: Tokenizer) -> None:
    ids = [EOS_ID, *byte_ids(b"a"), IM_END_ID, EOS_ID, *byte_ids(b"b"), IM_END_ID]
    visible = frozenset({IM_END_ID})
    assert pieces(Detokenizer(tokenizer, visible=visible), ids) == ["", "a", "<|im_end|>", "", "b", "<|im_end|>", ""]
    shown = pieces(Detokenizer(tokenizer, visible=visible, skip_special_tokens=False), ids)
    assert shown == ["<|eos|>", "a", "<|im_end|>", "<|eos|>", "b", "<|im_end|>", ""]


def test_a_visible_token_breaks_a_character_off(tokenizer: Tokenizer) -> None:
    """Its second half once came out as the whole character, or with the text before it told again."""
    first, rest = byte_ids("日".encode()[:2]), byte_ids("日".encode()[2:])
    ids = [*first, IM_END_ID, *rest, *byte_ids("日".encode())]
    shown = pieces(Detokenizer(tokenizer, visible=frozenset({IM_END_ID})), ids)
    assert shown[:3] == ["", "", "\ufffd<|im_end|>"]
    assert "".join(shown[3:]) == "\ufffd日"


@pytest.mark.parametrize("skip", [True, False])
def test_the_space_behind_a_visible_token_is_kept(fallback_tokenizer: Tokenizer, skip: bool) -> None:
    """Decoders drop the first space of a text, and a special token that is skipped is no text before it."""
    words = fallback_tokenizer.encode("hello a", add_special_tokens=False)
    bos, eos = 1, 2
    for after in ([], [eos], [bos], words):
        detokenizer = Detokenizer(fallback_tokenizer, after=after, visible=frozenset({eos}), skip_special_tokens=skip)
        assert "".join(pieces(detokenizer, [eos, *words])) == "</s> hello a"
    resumed = Detokenizer(fallback_tokenizer, after=[eos], visible=frozenset({eos}), skip_special_tokens=skip)
    assert "".join(pieces(resumed, words)) == " hello a"
