"""Tokenizers small enough to read, for tests of everything that turns tokens into text.

They are byte-level BPE over the 256 bytes and a few merges, so any text can be written, and a character of several
bytes is several tokens:

    0 <|eos|>   1 <|im_start|>   2 <|im_end|>   3..258 the bytes 0..255   259.. the merges
"""

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

EOS, IM_START, IM_END = "<|eos|>", "<|im_start|>", "<|im_end|>"
EOS_ID, IM_START_ID, IM_END_ID = 0, 1, 2
FIRST_BYTE_ID = 3

CHAT_TEMPLATE = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{%- endif %}
"""

MERGES = ["t h", "th e", "i n", "a n", "an d", "Ġ the", "Ġ a", "e r", "o u", "r e", "h e", "l l", "he ll", "hell o"]


def byte_letters() -> list[str]:
    """Returns the letter that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    letters, spare = [""] * 256, 256
    for byte in range(256):
        if byte in printable:
            letters[byte] = chr(byte)
        else:
            letters[byte], spare = chr(spare), spare + 1
    return letters


def build_tiny_tokenizer() -> Tokenizer:
    vocab = {EOS: EOS_ID, IM_START: IM_START_ID, IM_END: IM_END_ID}
    vocab |= {letter: FIRST_BYTE_ID + byte for byte, letter in enumerate(byte_letters())}
    merges = []
    for merge in MERGES:
        left, right = merge.split()
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(BPE(vocab, merges))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (EOS, IM_START, IM_END)])
    return tokenizer


def save_tiny_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Writes the tokenizer as a Hugging Face folder, which can already hold a model."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tiny_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder


@cache
def _tokenizer() -> Tokenizer:
    return build_tiny_tokenizer()


@cache
def _ids(text: str) -> list[int]:
    return list(_tokenizer().encode(text).ids)


def fake_answer(text: str, *, eos: bool = True) -> list[int]:
    """Returns an answer's tokens, for the script of a `FakeEngine`. Without `eos` they repeat up to max_tokens."""
    return [*_ids(text), EOS_ID] if eos else _ids(text).copy()


def build_byte_fallback_tokenizer() -> Tokenizer:
    """Builds one as sentencepiece models have it: U+2581 for a space, one before the text, <0xNN> for unknown letters.

    0 <unk>   1 <s>   2 </s>   3..258 the bytes 0..255   259.. letters and merges
    """
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": FIRST_BYTE_ID + byte for byte in range(256)}
    merges = []
    for letter in "\u2581abcdefghijklmnopqrstuvwxyz.,!\u00e9":
        vocab[letter] = len(vocab)
    for left, right in [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\u2581", "hello"), ("\u2581", "a")]:
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer
