"""The table of tokens that can be read by themselves: what is in it may be shown without asking the decoder."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import WordPiece

from motet.text.detokenize import Detokenizer
from motet.text.tokenizer import Tokenizer
from tests.tiny_tokenizer import EOS_ID, FIRST_BYTE_ID, IM_START_ID, build_tiny_tokenizer


def test_whole_characters_are_read_as_between_two_others(tokenizer: Tokenizer) -> None:
    texts = {i: tokenizer.texts[i] for i in tokenizer.encode("hello the\n 7")}
    assert list(texts.values()) == ["hello", " the", "\n", " ", "7"]


@pytest.mark.parametrize("token_id", [FIRST_BYTE_ID + 0xE6, FIRST_BYTE_ID + 0x97, EOS_ID, IM_START_ID, 10**6])
def test_parts_of_characters_special_tokens_and_unknown_ids_cannot_be_read(tokenizer: Tokenizer, token_id: int) -> None:
    assert tokenizer.texts[token_id] == ""


def test_a_word_behind_a_space_keeps_it_and_bytes_wait_for_their_neighbours(fallback_tokenizer: Tokenizer) -> None:
    word = fallback_tokenizer.encode("hello", add_special_tokens=False)
    newline = fallback_tokenizer.encode("\n")[-1]
    assert [fallback_tokenizer.texts[i] for i in (*word, newline)] == [" hello", ""]


def test_spaces_that_a_decoder_takes_off_the_ends_of_a_text_stay_inside() -> None:
    backend = build_tiny_tokenizer()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 1)])
    assert Tokenizer(backend).texts[FIRST_BYTE_ID + ord(" ")] == " "


def test_where_tokens_change_their_neighbours_none_is_read_by_itself() -> None:
    backend = Backend(WordPiece({"[UNK]": 0, "a": 1, "run": 2, "##ning": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    assert [tokenizer.texts[i] for i in (1, 2, 3)] == ["", "", ""]
    detokenizer = Detokenizer(tokenizer)
    assert "".join(map(detokenizer.feed, (1, 2, 3))) + detokenizer.close() == "a running"
