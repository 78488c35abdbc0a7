"""Tokenizers are loaded from a folder, and return the texts and bytes of single tokens."""

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import BPE, WordLevel, WordPiece

from motet.errors import ModelLoadError
from motet.text.detokenize import Detokenizer
from motet.text.tokenizer import MAX_SHORT, Tokenizer
from tests.tiny_tokenizer import (
    CHAT_TEMPLATE,
    EOS_ID,
    FIRST_BYTE_ID,
    IM_END_ID,
    IM_START_ID,
    build_tiny_tokenizer,
    fake_answer,
    save_tiny_tokenizer,
)


def test_a_saved_tokenizer_is_the_same_after_loading(tmp_path: Path, tokenizer: Tokenizer) -> None:
    loaded = Tokenizer.load(save_tiny_tokenizer(tmp_path))
    assert loaded.encode("hello and 日") == tokenizer.encode("hello and 日")
    assert loaded.chat_template == CHAT_TEMPLATE
    assert loaded.special_ids == {EOS_ID, IM_START_ID, IM_END_ID}
    assert loaded.named_tokens == {"eos_token": "<|eos|>", "pad_token": "<|eos|>"}
    assert loaded.vocab_size == tokenizer.vocab_size


def test_the_template_can_be_in_the_config_and_the_operator_s_replaces_it(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path, chat_template=None)
    assert Tokenizer.load(tmp_path).chat_template is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
    assert Tokenizer.load(tmp_path).chat_template == "one"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "two"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert Tokenizer.load(tmp_path).chat_template == "two"
    assert Tokenizer.load(tmp_path, chat_template="mine").chat_template == "mine"


def test_tokens_named_in_the_config_are_special_if_the_vocabulary_has_them(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    config = {"bos_token": {"content": "hello"}, "eos_token": "<nowhere>", "extra_special_tokens": ["and"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = Tokenizer.load(tmp_path)
    [hello], [the], [and_] = (fake_answer(text, eos=False) for text in ("hello", "the", "and"))
    assert loaded.named_tokens == {"bos_token": "hello", "eos_token": "<nowhere>"}
    assert loaded.special_ids == {EOS_ID, IM_START_ID, IM_END_ID, hello, and_}
    assert loaded.decode([hello, the, and_]) == "the"


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("hello the and") == fake_answer("hello the and", eos=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b'{"model": 1}'),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b'{"bos_token": 1}'),
        ("tokenizer_config.json", b'{"bos_token": "\xff"}'),
        ("tokenizer_config.json", b"[" * 100_000),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_the_error_names_a_missing_or_broken_file(tmp_path: Path, name: str, content: bytes | None) -> None:
    save_tiny_tokenizer(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=re.escape(name)) as raised:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_bytes_of_byte_level_tokens_are_exact(tokenizer: Tokenizer) -> None:
    text = "hello the 日本 \x00\x7f\xa0\xad"
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == tokenizer.decode(ids).encode() == text.encode()
    split = tokenizer.encode("日")
    assert [tokenizer.token_bytes(i) for i in split] == [b"\xe6", b"\x97", b"\xa5"]
    assert [tokenizer.token_text(i) for i in split] == ["\ufffd"] * 3


def test_a_byte_level_entry_of_other_letters_is_plain_text() -> None:
    backend = Backend(BPE({"\u0120a": 0, "\u65e5\u0120": 1}, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    assert (tokenizer.token_bytes(0), tokenizer.token_text(1)) == (b" a", tokenizer.decode([1]))
    assert tokenizer.token_text(1) == "\u65e5\u0120"


def test_bytes_of_byte_fallback_tokens_are_exact(fallback_tokenizer: Tokenizer) -> None:
    ids = fallback_tokenizer.encode("hello é\n日", add_special_tokens=False)
    assert b"".join(map(fallback_tokenizer.token_bytes, ids)) == " hello é\n日".encode()
    assert fallback_tokenizer.token_text(ids[0]) == " hello"
    assert fallback_tokenizer.token_name(ids[0]) == "\u2581hello"
    assert fallback_tokenizer.token_name(fallback_tokenizer.encode("\n")[-1]) == "<0x0A>"


def test_the_bytes_of_a_tokenizer_without_a_decoder_are_its_entries() -> None:
    assert Tokenizer(Backend(WordLevel({"word": 0}, unk_token="word"))).token_bytes(0) == b"word"


def test_special_tokens_have_a_text_but_are_skipped_in_decoded_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_text(IM_END_ID) == "<|im_end|>"
    assert tokenizer.token_bytes(EOS_ID) == b"<|eos|>"
    assert tokenizer.decode([IM_START_ID, *fake_answer("a")]) == "a"
    assert tokenizer.decode([IM_START_ID, *fake_answer("a")], skip_special_tokens=False) == "<|im_start|>a<|eos|>"


def test_ids_outside_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    past = tokenizer.vocab_size
    assert tokenizer.token_bytes(past) == b""
    assert tokenizer.token_name(past) == ""
    assert tokenizer.decode([past]) == ""


# `texts` has the texts of tokens that do not need the decoder.
def test_tokens_of_complete_characters_have_a_text(tokenizer: Tokenizer) -> None:
    texts = {i: tokenizer.texts[i] for i in tokenizer.encode("hello the\n 7")}
    assert list(texts.values()) == ["hello", " the", "\n", " ", "7"]


@pytest.mark.parametrize("token_id", [FIRST_BYTE_ID + 0xE6, FIRST_BYTE_ID + 0x97, EOS_ID, IM_START_ID, 10**6])
def test_half_characters_special_tokens_and_unknown_ids_have_no_text_of_their_own(
    tokenizer: Tokenizer, token_id: int
) -> None:
    assert tokenizer.texts[token_id] == ""


def test_a_word_keeps_the_space_before_it_and_single_bytes_have_no_text(fallback_tokenizer: Tokenizer) -> None:
    word = fallback_tokenizer.encode("hello", add_special_tokens=False)
    newline = fallback_tokenizer.encode("\n")[-1]
    assert [fallback_tokenizer.texts[i] for i in (*word, newline)] == [" hello", ""]


def test_spaces_that_a_decoder_strips_at_the_ends_of_a_text_are_kept_inside_it() -> None:
    backend = build_tiny_tokenizer()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 1)])
    assert Tokenizer(backend).texts[FIRST_BYTE_ID + ord(" ")] == " "


def test_no_token_has_a_text_of_its_own_if_tokens_change_their_neighbours() -> None:
    backend = Backend(WordPiece({"[UNK]": 0, "a": 1, "run": 2, "##ning": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    assert [tokenizer.texts[i] for i in (1, 2, 3)] == ["", "", ""]
    assert tokenizer.token_bytes(2) == b"run"
    detokenizer = Detokenizer(tokenizer)
    assert "".join(map(detokenizer.feed, (1, 2, 3))) + detokenizer.close() == "a running"


@pytest.mark.slow
def test_long_texts_are_encoded_and_decoded_like_short_ones(
    tokenizer: Tokenizer, fallback_tokenizer: Tokenizer
) -> None:
    """Long texts use another function of the library, which releases the GIL."""
    text = "hello, the é日 " * MAX_SHORT
    for each in (tokenizer, fallback_tokenizer):
        for special in (False, True):
            ids = each.encode(text, add_special_tokens=special)
            assert ids == each.backend.encode(text, add_special_tokens=special).ids
            assert each.decode(ids, skip_special_tokens=special) == each.backend.decode(
                ids, skip_special_tokens=special
            )
