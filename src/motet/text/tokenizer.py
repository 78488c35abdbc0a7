"""Turns text into token ids and back, with the tokenizer of a model folder in Hugging Face's layout.

`tokenizer.json` is read with the `tokenizers` library itself: transformers' AutoTokenizer would import torch into the
process that serves HTTP. A token need not be whole characters, so its text may lose bytes, which log-probabilities
and grammars need exactly. Three kinds of vocabulary write bytes differently:

    byte-level     each byte is a letter (GPT-2's table): "Ġthe" is b" the"
    byte fallback  words with U+2581 for a space, and <0xNN> for a byte that is in no word (sentencepiece)
    other          the text that the decoder gives for the one token
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cached_property
from math import ceil
from pathlib import Path

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from motet.errors import ModelLoadError

SENTENCEPIECE_SPACE = "\u2581"
REPLACEMENT = "\ufffd"
"""Decoders write this for bytes that are not a character."""


LONG = 2048
"""Longer texts, and more tokens, go to the library as a batch of one: only then does it let other threads run."""


class Tokenizer:
    """The tokenizer of one model. It may be used in threads."""

    def __init__(
        self,
        backend: Backend,
        *,
        named_tokens: dict[str, str] | None = None,
        chat_template: str | None = None,
        class_name: str = "PreTrainedTokenizerFast",
    ) -> None:
        """`class_name`: transformers' class for it, which clients may ask for."""
        backend.no_truncation()
        backend.no_padding()
        self.named_tokens = named_tokens or {}
        """Name of a token, such as `bos_token` -> its text."""
        self.chat_template = chat_template
        """Jinja text; None if the model has none."""
        self.class_name = class_name
        self.backend = backend
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        spelling = spelling_of(backend)
        self.texts = TokenTexts(backend, self.special_ids, spelling=spelling)
        """Texts of tokens that can be read one by one."""
        self._bytes = TokenBytes(backend, spelling)
        self._longest: int | None = None
        """The most characters of one token; None if an unknown word of any length can be one token."""
        if spelling is not Spelling.OTHER:
            self._longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)

    @classmethod
    def load(cls, folder: Path, *, chat_template: str | None = None) -> "Tokenizer":
        """Raises `ModelLoadError`. `chat_template`: Jinja text in place of the model's own."""
        backend = _read_backend(folder / "tokenizer.json")
        config = _read_config(folder / "tokenizer_config.json")
        _mark_special(backend, config.special_texts())
        template = chat_template if chat_template is not None else _read_template(folder, config)
        named, class_name = config.named_tokens(), config.tokenizer_class
        return cls(backend, named_tokens=named, chat_template=template, class_name=class_name)

    @property
    def vocab_size(self) -> int:
        """Number of entries, with added ones; the model may know more ids, which have no text."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The text of each special token -> its id."""
        return {self.token_text(token_id): token_id for token_id in sorted(self.special_ids)}

    def least_tokens(self, num_chars: int) -> int:
        """Returns the least number of tokens that a text of `num_chars` characters can have."""
        return 0 if self._longest is None else ceil(num_chars / self._longest)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) <= LONG:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        return list(self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(ids) <= LONG:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token by itself, also of a special one; U+FFFD for bytes that are no character."""
        return self._bytes[token_id].decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the exact bytes of the token, also if it is a part of a character."""
        return self._bytes[token_id]

    def token_name(self, token_id: int) -> str:
        """Returns the vocabulary's own entry (`Ġthe`, `<0x0A>`); empty for ids past the vocabulary."""
        return self.backend.id_to_token(token_id) or ""


class _Token(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    """The part of `tokenizer_config.json` that is used."""

    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    unk_token: str | _Token | None = None
    pad_token: str | _Token | None = None
    sep_token: str | _Token | None = None
    cls_token: str | _Token | None = None
    mask_token: str | _Token | None = None
    additional_special_tokens: list[str | _Token] | None = None
    extra_special_tokens: list[str | _Token] | dict[str, str | _Token] | None = None
    chat_template: str | list[_NamedTemplate] | None = None
    tokenizer_class: str = "PreTrainedTokenizerFast"

    def named_tokens(self) -> dict[str, str]:
        """Maps `bos_token` and the like, as chat templates know them, to the texts."""
        names = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
        return {name: _text(token) for name in names if (token := getattr(self, name)) is not None}

    def special_texts(self) -> list[str]:
        extra = self.extra_special_tokens or []
        more = [*(self.additional_special_tokens or []), *(extra.values() if isinstance(extra, dict) else extra)]
        return [*self.named_tokens().values(), *map(_text, more)]

    def default_template(self) -> str | None:
        if isinstance(self.chat_template, list):
            return next((t.template for t in self.chat_template if t.name == "default"), None)
        return self.chat_template


def _text(token: str | _Token) -> str:
    return token if isinstance(token, str) else token.content


def _read_backend(path: Path) -> Backend:
    if not path.is_file():
        raise ModelLoadError(
            f"no tokenizer.json in {path.parent}. A fast tokenizer is needed: save one there with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...), or name another folder with --tokenizer."
        )
    try:
        return Backend.from_file(str(path))
    except Exception as exc:  # the library raises plain Exception for all errors in the file
        raise ModelLoadError(f"{path} cannot be read as a tokenizer: {exc}") from exc


def _read_config(path: Path) -> _TokenizerConfig:
    if not path.is_file():
        return _TokenizerConfig()
    try:
        return msgspec.json.decode(path.read_bytes(), type=_TokenizerConfig)
    except (msgspec.DecodeError, OSError) as exc:
        raise ModelLoadError(f"{path} cannot be read: {exc}") from exc


def _read_template(folder: Path, config: _TokenizerConfig) -> str | None:
    path = folder / "chat_template.jinja"
    if not path.is_file():
        return config.default_template()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ModelLoadError(f"{path} cannot be read: {exc}") from exc


def _mark_special(backend: Backend, texts: Sequence[str]) -> None:
    """Makes those tokens special that the model's config lists, as transformers does, also if tokenizer.json does not.

    Texts that are not in the vocabulary are left out: a new token would get an id that the model does not know.
    """
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [text for text in texts if text not in special and backend.token_to_id(text) is not None]
    if missing:
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


class Spelling(Enum):
    BYTE_LEVEL = "byte-level"
    BYTE_FALLBACK = "byte fallback"
    OTHER = "other"


class _Decoder(msgspec.Struct):
    """The part of a decoder's JSON that names its kind; the rest is skipped."""

    type: str
    decoders: "list[_Decoder]" = []


class _TokenizerJson(msgspec.Struct):
    decoder: _Decoder | None = None


def spelling_of(backend: Backend) -> Spelling:
    decoder = msgspec.json.decode(backend.to_str(), type=_TokenizerJson).decoder
    left, kinds = [decoder] if decoder else [], set[str]()
    while left:
        decoder = left.pop()
        kinds.add(decoder.type)
        left += decoder.decoders
    if "ByteLevel" in kinds:
        return Spelling.BYTE_LEVEL
    return Spelling.BYTE_FALLBACK if "ByteFallback" in kinds else Spelling.OTHER


def letter_bytes() -> dict[str, int]:
    """Returns GPT-2's table: a printable byte is its own letter, and the others are the letters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def is_byte(name: str) -> bool:
    """Returns True for an entry `<0xNN>` of a vocabulary with byte fallback."""
    return len(name) == 6 and name.startswith("<0x") and name.endswith(">")


class TokenTexts(dict[int, str]):
    """Token id -> its text between two other tokens, filled in as ids are asked for.

    Empty for a token whose text also depends on its neighbours (part of a character), and for special ones and those
    without text. So these texts may be shown as they come, if there is text before them and nothing is held.
    """

    def __init__(self, backend: Backend, special_ids: frozenset[int], *, spelling: Spelling) -> None:
        super().__init__()
        self._backend = backend
        self._special_ids = special_ids
        plain = backend.encode("a", add_special_tokens=False).ids
        self._beside = plain[-1:] if spelling is not Spelling.OTHER else []
        """A token that is text by itself; empty if it is not known how tokens make up a text."""

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


class TokenBytes(dict[int, bytes]):
    """Token id -> the bytes it stands for, filled in as ids are asked for; none for ids past the vocabulary."""

    def __init__(self, backend: Backend, spelling: Spelling) -> None:
        super().__init__((i, token.content.encode()) for i, token in backend.get_added_tokens_decoder().items())
        self._backend = backend
        self._spelling = spelling
        self._letters = letter_bytes()

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = spelled = self._spell(token_id)
        return spelled

    def _spell(self, token_id: int) -> bytes:
        name = self._backend.id_to_token(token_id)
        if name is None:
            return b""
        if self._spelling is Spelling.BYTE_LEVEL:
            if not self._letters.keys() >= set(name):
                return name.encode()  # an entry that was added as plain text; the decoder reads it so too
            return bytes(self._letters[letter] for letter in name)
        if self._spelling is Spelling.BYTE_FALLBACK:
            if is_byte(name):
                return bytes.fromhex(name[3:5])
            return name.replace(SENTENCEPIECE_SPACE, " ").encode()
        return self._backend.decode([token_id], skip_special_tokens=False).encode()
