"""Turns text into token ids and back, with the tokenizer of a model folder in Hugging Face's layout.

`tokenizer.json` is loaded with the library `tokenizers` directly: transformers' AutoTokenizer would import torch into
the process that serves HTTP. A token can be a part of a character. Its text then loses bytes, but log-probabilities and
grammars need the exact bytes. There are three kinds of vocabularies with different entries for bytes:

    byte-level     a letter for each byte (GPT-2's table): "Ġthe" is b" the"
    byte fallback  words with U+2581 for a space, and <0xNN> for a byte that is not part of a word (sentencepiece)
    other          unknown entries; the bytes of a token are the text that the decoder returns for it alone
"""

from collections.abc import Container, Mapping, Sequence
from enum import Enum
from functools import cached_property
from math import ceil
from pathlib import Path

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from motet.errors import ModelLoadError
from motet.text.rendering.control_tokens import ControlTokens

SENTENCEPIECE_SPACE = "\u2581"
REPLACEMENT = "\ufffd"
"""Character that decoders return for bytes that are not a character."""
MAX_SHORT = 2048
"""Maximum number of characters or tokens that are not passed to the library as a batch of one. Only for a batch does
the library release the GIL."""


class Tokenizer:
    """The tokenizer of one model. Thread-safe."""

    def __init__(
        self,
        backend: Backend,
        *,
        named_tokens: dict[str, str] | None = None,
        chat_template: str | None = None,
        class_name: str = "PreTrainedTokenizerFast",
    ) -> None:
        """`class_name`: name of transformers' class for this tokenizer, which a route returns to clients."""
        backend.no_truncation()
        backend.no_padding()
        self.named_tokens = named_tokens or {}
        """Texts of tokens by their names, such as `bos_token`."""
        self.chat_template = chat_template
        """Jinja source of the chat template; None if the model has none."""
        self.class_name = class_name
        self.backend = backend
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        kind = vocabulary_kind(backend)
        self.texts = TokenTexts(backend, self.special_ids, kind=kind)
        self._bytes = TokenBytes(backend, kind)
        longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        self._longest = None if kind is VocabularyKind.OTHER else longest
        """Maximum number of characters of a token; None if an unknown word of any length can be one token."""

    @classmethod
    def load(cls, folder: Path, *, chat_template: str | None = None) -> "Tokenizer":
        """Loads the tokenizer in a folder. Raises `ModelLoadError`. `chat_template`: Jinja source that replaces the
        model's own template."""
        backend = _read_backend(folder / "tokenizer.json")
        config = _read_config(folder / "tokenizer_config.json")
        _mark_special(backend, config.special_texts())
        template = _read_template(folder, config) if chat_template is None else chat_template
        named, class_name = config.named_tokens(), config.tokenizer_class
        return cls(backend, named_tokens=named, chat_template=template, class_name=class_name)

    @property
    def vocab_size(self) -> int:
        """Number of entries, including added ones. The model can have more ids; these have no text."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def control_tokens(self) -> ControlTokens:
        return ControlTokens(self.backend, unknown=self.named_tokens.get("unk_token"))

    @cached_property
    def json(self) -> str:
        """The content of `tokenizer.json`. Kept, because the library makes it for 100 ms, and holds the GIL."""
        return str(self.backend.to_str())

    @cached_property
    def num_added(self) -> tuple[int, int]:
        """Number of special tokens that `encode` adds at the start and at the end of a text."""
        plain, ids = self.encode("a", add_special_tokens=False), self.encode("a")
        fitting = (start for start in range(len(ids)) if ids[start : start + len(plain)] == plain)
        start = next(fitting, 0)
        return start, max(0, len(ids) - start - len(plain))

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of special tokens by their texts."""
        return {self.token_text(token_id): token_id for token_id in sorted(self.special_ids)}

    def min_num_tokens(self, num_chars: int) -> int:
        """Returns the minimum number of tokens of a text with `num_chars` characters."""
        return 0 if self._longest is None else ceil(num_chars / self._longest)

    def encode(self, text: str, *, add_special_tokens: bool = True, as_text: Container[int] | None = None) -> list[int]:
        """Returns the ids of a text. `as_text`: starts of texts of control tokens that are not tokens, but text."""
        if as_text is not None:
            return self.control_tokens.encode(text, as_text=as_text, add_special_tokens=add_special_tokens)
        if len(text) <= MAX_SHORT:
            return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        return list(self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def offsets(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids of a text, and the characters [start, end) of each token. All special tokens in the text are
        tokens. Takes more memory than `encode`."""
        encoding = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        # `encoding.offsets` makes all of them at once: for a million tokens, no other thread runs for 150 ms.
        ids = list(encoding.ids)
        return ids, [encoding.token_to_chars(i) or (0, 0) for i in range(len(ids))]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(ids) <= MAX_SHORT:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return self.backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token alone, even if it is special. Bytes that are not a character become U+FFFD."""
        return self._bytes[token_id].decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the exact bytes of the token, even if it is a part of a character."""
        return self._bytes[token_id]

    def token_name(self, token_id: int) -> str:
        """Returns the vocabulary's entry (`Ġthe`, `<0x0A>`); an empty string for ids outside the vocabulary."""
        return self.backend.id_to_token(token_id) or ""


class _Token(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    """The fields of `tokenizer_config.json` that are used."""

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
        """Returns the texts of tokens by the names that chat templates use, such as `bos_token`."""
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
            f"there is no tokenizer.json in {path.parent}. A fast tokenizer is required: save one there with "
            "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...), or set another folder with "
            "--tokenizer."
        )
    try:
        return Backend.from_file(str(path))
    except Exception as exc:  # the library raises plain Exception for all errors in the file
        raise ModelLoadError(f"{path} is not a valid tokenizer: {exc}") from exc


def _read_config(path: Path) -> _TokenizerConfig:
    if not path.is_file():
        return _TokenizerConfig()
    try:
        return msgspec.json.decode(path.read_bytes(), type=_TokenizerConfig)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError) as exc:
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
    """Marks the tokens that the model's config lists as special, as transformers does, even if tokenizer.json does not
    mark them. Skips texts that are not in the vocabulary: a new token would get an id that the model does not have."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    if missing := [text for text in texts if text not in special and backend.token_to_id(text) is not None]:
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


class VocabularyKind(Enum):
    """How the entries of a vocabulary encode bytes."""

    BYTE_LEVEL = "byte-level"
    BYTE_FALLBACK = "byte fallback"
    OTHER = "other"


class _Decoder(msgspec.Struct):
    """The fields of a decoder's JSON that determine its kind."""

    type: str
    decoders: "list[_Decoder]" = []

    def types(self) -> set[str]:
        return {self.type}.union(*(decoder.types() for decoder in self.decoders))


class _TokenizerJson(msgspec.Struct):
    decoder: _Decoder | None = None


def vocabulary_kind(backend: Backend) -> VocabularyKind:
    decoder = msgspec.json.decode(backend.to_str(), type=_TokenizerJson).decoder
    types = decoder.types() if decoder else set()
    if "ByteLevel" in types:
        return VocabularyKind.BYTE_LEVEL
    return VocabularyKind.BYTE_FALLBACK if "ByteFallback" in types else VocabularyKind.OTHER


def letter_bytes() -> dict[str, int]:
    """Returns GPT-2's table of bytes by letters: the letter of a printable byte is its own character, the letters of
    other bytes are U+0100 and the following characters."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def is_byte(name: str) -> bool:
    """Returns True for an entry such as `<0x0A>` of a vocabulary with byte fallback."""
    return len(name) == 6 and name.startswith("<0x") and name.endswith(">")


class TokenTexts(dict[int, str]):
    """Texts of tokens between two other tokens, by token id, computed when they are first used. The text is empty for a
    token whose text depends on its neighbours (a part of a character), and for special tokens. A text in this table can
    be sent to the client at once, if there is text before it and no token is held."""

    def __init__(self, backend: Backend, special_ids: frozenset[int], *, kind: VocabularyKind) -> None:
        super().__init__()
        self._backend = backend
        self._special_ids = special_ids
        plain = backend.encode("a", add_special_tokens=False).ids
        self.neighbour = plain[-1:] if kind is not VocabularyKind.OTHER else []
        """A token that is text by itself; empty if the composition of texts from tokens is not known."""

    def __missing__(self, token_id: int) -> str:
        self[token_id] = text = self._text(token_id)
        return text

    def _text(self, token_id: int) -> str:
        name = self._backend.id_to_token(token_id)
        if not self.neighbour or name is None or token_id in self._special_ids or is_byte(name):
            return ""
        before = self._decode(self.neighbour)
        after = self._decode(self.neighbour * 2).removeprefix(before)
        text = self._decode([*self.neighbour, token_id, *self.neighbour])
        if REPLACEMENT in text or not (text.startswith(before) and text.endswith(after)):
            return ""
        return text[len(before) : len(text) - len(after)]

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)


class TokenBytes(dict[int, bytes]):
    """Bytes of tokens by token id, computed when they are first used. Ids outside the vocabulary have no bytes."""

    def __init__(self, backend: Backend, kind: VocabularyKind) -> None:
        super().__init__((i, token.content.encode()) for i, token in backend.get_added_tokens_decoder().items())
        self._backend = backend
        self._kind = kind
        self._letters = letter_bytes()

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = content = self._content(token_id)
        return content

    def _content(self, token_id: int) -> bytes:
        if (name := self._backend.id_to_token(token_id)) is None:
            return b""
        if self._kind is VocabularyKind.BYTE_LEVEL:
            if not self._letters.keys() >= set(name):
                return name.encode()  # an entry that was added as plain text; the decoder treats it in the same way
            return bytes(self._letters[letter] for letter in name)
        if self._kind is VocabularyKind.BYTE_FALLBACK:
            return bytes.fromhex(name[3:5]) if is_byte(name) else name.replace(SENTENCEPIECE_SPACE, " ").encode()
        return self._backend.decode([token_id], skip_special_tokens=False).encode()
