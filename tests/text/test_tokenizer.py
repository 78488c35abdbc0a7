"""Tokenizers read from a folder, and what single tokens stand for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import BPE, WordLevel, WordPiece

from motet.errors import ModelLoadError
from motet.text.tokenizer import Tokenizer
from tests.tiny_tokenizer import CHAT_TEMPLATE, EOS_ID, IM_END_ID, IM_START_ID, fake_answer, save_tiny_tokenizer


def test_the_text_layer_does_not_import_torch() -> None:
    modules = "tokenizer template prepare detokenize stop choice group logprobs"
    imports = ", ".join(f"motet.text.{module}" for module in modules.split())
    code = f"import sys, {imports}; print('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_text_survives_encoding_and_decoding(tokenizer: Tokenizer) -> None:
    text = "hello the 日本語, 🎼 and\n\tè"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_saved_folder_loads_as_it_was(tmp_path: Path, tokenizer: Tokenizer) -> None:
    loaded = Tokenizer.load(save_tiny_tokenizer(tmp_path))
    assert loaded.encode("hello and 日") == tokenizer.encode("hello and 日")
    assert loaded.chat_template == CHAT_TEMPLATE
    assert loaded.special_ids == {EOS_ID, IM_START_ID, IM_END_ID}
    assert loaded.named_tokens == {"eos_token": "<|eos|>", "pad_token": "<|eos|>"}
    assert loaded.vocab_size == tokenizer.vocab_size
    assert loaded.bos_token_id is None


def test_the_users_chat_template_replaces_the_models(tmp_path: Path) -> None:
    assert Tokenizer.load(save_tiny_tokenizer(tmp_path), chat_template="mine").chat_template == "mine"


def test_the_template_may_stand_in_the_config(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path, chat_template=None)
    assert Tokenizer.load(tmp_path).chat_template is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
    assert Tokenizer.load(tmp_path).chat_template == "one"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "two"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert Tokenizer.load(tmp_path).chat_template == "two"


def test_tokens_named_in_the_config_are_special(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    config = {"bos_token": {"content": "hello"}, "additional_special_tokens": None, "extra_special_tokens": ["and"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    hello, the = fake_answer("hello", eos=False)[0], fake_answer("the", eos=False)[0]
    assert tokenizer.bos_token_id == hello
    assert tokenizer.decode([hello, the]) == "the"
    assert hello in tokenizer.special_ids
    assert tokenizer.decode(tokenizer.encode("and")) == ""


def test_a_special_token_the_vocabulary_lacks_gets_no_id(tmp_path: Path, tokenizer: Tokenizer) -> None:
    save_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<nowhere>"}))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.bos_token_id is None
    assert loaded.vocab_size == tokenizer.vocab_size


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=16)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("hello the and") == fake_answer("hello the and", eos=False)


@pytest.mark.parametrize("content", [None, "{", '{"model": 1}'])
def test_a_missing_or_broken_tokenizer_is_said_with_its_path(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["{", '{"bos_token": 1}'])
def test_a_broken_tokenizer_config_is_said_with_its_path(tmp_path: Path, content: str) -> None:
    save_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


def test_a_template_that_is_not_text_is_said_with_its_path(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja"):
        Tokenizer.load(tmp_path)


def test_bytes_of_byte_level_tokens_are_exact(tokenizer: Tokenizer) -> None:
    text = "hello the 日本 \x00\x7f\xa0\xad"
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    cut = tokenizer.encode("日")
    assert [tokenizer.token_bytes(i) for i in cut] == [b"\xe6", b"\x97", b"\xa5"]
    assert [tokenizer.token_text(i) for i in cut] == ["\ufffd"] * 3


def test_a_byte_level_entry_of_other_letters_is_plain_text() -> None:
    backend = Backend(BPE({"\u0120a": 0, "\u65e5\u0120": 1}, []))
    backend.decoder = ByteLevelDecoder()
    tokenizer = Tokenizer(backend)
    assert (tokenizer.token_bytes(0), tokenizer.token_text(1)) == (b" a", tokenizer.decode([1]))
    assert tokenizer.token_text(1) == "\u65e5\u0120"


def test_bytes_of_byte_fallback_tokens_are_exact(fallback_tokenizer: Tokenizer) -> None:
    ids = fallback_tokenizer.encode("hello é\n日", add_special_tokens=False)
    assert b"".join(map(fallback_tokenizer.token_bytes, ids)) == " hello é\n日".encode()
    assert fallback_tokenizer.token_text(ids[0]) == " hello"
    assert fallback_tokenizer.token_name(ids[0]) == "\u2581hello"
    assert fallback_tokenizer.token_name(fallback_tokenizer.encode("\n")[-1]) == "<0x0A>"


def test_bytes_of_other_vocabularies_are_their_decoded_text() -> None:
    backend = Backend(WordPiece({"[UNK]": 0, "run": 1, "##ning": 2}, unk_token="[UNK]"))
    backend.decoder = WordPieceDecoder()
    tokenizer = Tokenizer(backend)
    assert tokenizer.token_bytes(1) == b"run"
    assert tokenizer.decode([1, 2]) == "running"


def test_a_tokenizer_without_a_decoder_spells_its_entries() -> None:
    assert Tokenizer(Backend(WordLevel({"word": 0}, unk_token="word"))).token_bytes(0) == b"word"


def test_special_tokens_are_visible_one_by_one_and_skipped_in_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_text(IM_END_ID) == "<|im_end|>"
    assert tokenizer.token_bytes(EOS_ID) == b"<|eos|>"
    assert tokenizer.decode([IM_START_ID, *fake_answer("a")]) == "a"
    assert tokenizer.decode([IM_START_ID, *fake_answer("a")], skip_special_tokens=False) == "<|im_start|>a<|eos|>"


def test_ids_past_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    past = tokenizer.vocab_size
    assert tokenizer.token_bytes(past) == b""
    assert tokenizer.token_name(past) == ""
    assert tokenizer.decode([past]) == ""


def test_special_tokens_are_added_only_when_asked(fallback_tokenizer: Tokenizer) -> None:
    with_bos = fallback_tokenizer.encode("a")
    assert with_bos[0] == fallback_tokenizer.bos_token_id == 1
    assert with_bos[1:] == fallback_tokenizer.encode("a", add_special_tokens=False)
