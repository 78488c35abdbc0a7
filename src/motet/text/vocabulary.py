"""What the entries of a vocabulary stand for, byte by byte.

A token need not be whole characters, so its text alone loses bytes; log-probabilities show them exactly. Three kinds
of vocabulary write bytes down differently:

    byte-level     each byte is a letter (GPT-2's table): "Ġthe" is b" the"
    byte fallback  words with U+2581 for a space, and <0xNN> for a byte that is in no word (sentencepiece)
    other          whatever the decoder makes of the one token
"""

from collections.abc import Iterator
from enum import Enum

import msgspec
from tokenizers import Tokenizer

SENTENCEPIECE_SPACE = "\u2581"
REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no character."""


class Spelling(Enum):
    BYTE_LEVEL = "byte-level"
    BYTE_FALLBACK = "byte fallback"
    OTHER = "other"


class _Decoder(msgspec.Struct):
    """The part of a serialised decoder that names its kind; the rest of the JSON is skipped."""

    type: str
    decoders: "list[_Decoder]" = []


class _TokenizerJson(msgspec.Struct):
    decoder: _Decoder | None = None


def spelling_of(backend: Tokenizer) -> Spelling:
    decoder = msgspec.json.decode(backend.to_str(), type=_TokenizerJson).decoder
    kinds = set(_kinds(decoder)) if decoder else set()
    if "ByteLevel" in kinds:
        return Spelling.BYTE_LEVEL
    return Spelling.BYTE_FALLBACK if "ByteFallback" in kinds else Spelling.OTHER


def _kinds(decoder: _Decoder) -> Iterator[str]:
    yield decoder.type
    for part in decoder.decoders:
        yield from _kinds(part)


def letter_bytes() -> dict[str, int]:
    """GPT-2's table: printable bytes are their own letter, the others the letters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def longest_entry(backend: Tokenizer) -> int | None:
    """Characters that one token stands for, at most; None where an unknown word of any length is one token."""
    if spelling_of(backend) is Spelling.OTHER:
        return None
    return max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)


def is_byte(name: str) -> bool:
    """Whether an entry of a vocabulary with byte fallback is `<0xNN>`."""
    return len(name) == 6 and name.startswith("<0x") and name.endswith(">")


class TokenTexts(dict[int, str]):
    """Token id -> its text between two other tokens, filled in as ids are asked for.

    Empty for a token whose text also depends on its neighbours (part of a character), and for special ones and those
    without text. So all that is in here may be shown as it comes, if there is text before it and nothing is held.
    """

    def __init__(self, backend: Tokenizer, special_ids: frozenset[int]) -> None:
        super().__init__()
        self._backend = backend
        self._special_ids = special_ids
        plain = backend.encode("a", add_special_tokens=False).ids
        self._beside = plain[-1:] if spelling_of(backend) is not Spelling.OTHER else []
        """A token that is text by itself; none where nothing is known about how tokens make up a text."""

    def __missing__(self, token_id: int) -> str:
        self[token_id] = text = self._read(token_id)
        return text

    def _read(self, token_id: int) -> str:
        name = self._backend.id_to_token(token_id)
        if not self._beside or name is None or token_id in self._special_ids or is_byte(name):
            return ""
        before = self._decode(self._beside)
        after = self._decode(self._beside * 2).removeprefix(before)
        text = self._decode([*self._beside, token_id, *self._beside])
        if REPLACEMENT in text or not (text.startswith(before) and text.endswith(after)):
            return ""
        return text[len(before) : len(text) - len(after)]

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)


class TokenBytes:
    """Token id -> the bytes it stands for. Ids past the vocabulary (a padded model has some) stand for none."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._spelling = spelling_of(backend)
        self._letters = letter_bytes()
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        name = self._backend.id_to_token(token_id)
        if name is None:
            return b""
        if self._spelling is Spelling.BYTE_LEVEL:
            if not self._letters.keys() >= set(name):
                return name.encode()  # an entry that was put in as plain text; the decoder takes it so too
            return bytes(self._letters[letter] for letter in name)
        if self._spelling is Spelling.BYTE_FALLBACK:
            if is_byte(name):
                return bytes.fromhex(name[3:5])
            return name.replace(SENTENCEPIECE_SPACE, " ").encode()
        return self._backend.decode([token_id], skip_special_tokens=False).encode()
