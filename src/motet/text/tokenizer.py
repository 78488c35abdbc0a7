"""Text to token ids and back, from a model folder in Hugging Face's layout.

Reads `tokenizer.json` with the `tokenizers` library itself: transformers' AutoTokenizer would import torch into the
process that serves HTTP.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import ceil
from pathlib import Path

import msgspec
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from motet.errors import ModelLoadError
from motet.text.vocabulary import TokenBytes, TokenTexts, longest_entry


class _Token(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    """What is used of `tokenizer_config.json`."""

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

    def named_tokens(self) -> dict[str, str]:
        """`bos_token` and the like -> its text; what chat templates know them by."""
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


class Tokenizer:
    """The tokenizer of one model. Encoding and decoding release the GIL and may run in threads."""

    def __init__(
        self, backend: Backend, *, named_tokens: dict[str, str] | None = None, chat_template: str | None = None
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.named_tokens = named_tokens or {}
        self.chat_template = chat_template
        """Jinja text, None if the model has none."""
        self._special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self._bytes = TokenBytes(backend)
        self._texts = TokenTexts(backend, self._special_ids)
        self._longest = longest_entry(backend)

    @classmethod
    def load(cls, folder: Path, *, chat_template: str | None = None) -> "Tokenizer":
        """Raises `ModelLoadError`. `chat_template`: Jinja text in place of the model's own."""
        backend = _read_backend(folder / "tokenizer.json")
        config = _read_config(folder / "tokenizer_config.json")
        _mark_special(backend, config.special_texts())
        template = chat_template if chat_template is not None else _read_template(folder, config)
        return cls(backend, named_tokens=config.named_tokens(), chat_template=template)

    @property
    def backend(self) -> Backend:
        return self._backend

    @property
    def vocab_size(self) -> int:
        """Entries, the added ones included; the model may know more ids, which have no text."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        bos = self.named_tokens.get("bos_token")
        return None if bos is None else self._backend.token_to_id(bos)

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special_ids

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Text of each special token -> its id."""
        return {self.token_text(token_id): token_id for token_id in sorted(self._special_ids)}

    @property
    def texts(self) -> TokenTexts:
        """Of tokens that can be read one by one."""
        return self._texts

    def least_tokens(self, num_chars: int) -> int:
        """A text of so many characters has at least so many tokens, whatever it says."""
        return 0 if self._longest is None else ceil(num_chars / self._longest)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token by itself, special ones visible; U+FFFD for bytes that are no whole character."""
        return self._bytes[token_id].decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Exactly what the token stands for, also where it is part of a character."""
        return self._bytes[token_id]

    def token_name(self, token_id: int) -> str:
        """The vocabulary's own entry (`Ġthe`, `<0x0A>`); empty for ids past the vocabulary."""
        return self._backend.id_to_token(token_id) or ""


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
    except Exception as exc:  # the library raises plain Exception for whatever is wrong in the file
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
    """Tokens that the model's config calls special are so, as in transformers, even if tokenizer.json does not say it.

    Only those that are in the vocabulary: a new one would get an id the model does not know.
    """
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [text for text in texts if text not in special and backend.token_to_id(text) is not None]
    if missing:
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])
