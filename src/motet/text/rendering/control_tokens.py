"""Control tokens, such as `<|im_start|>`: detects them in a tokenizer, finds their texts, and encodes prompts in which
some of these texts are not tokens, but plain text.

The library `tokenizers` reads the text of a control token as the token, also in the message of a client. For a prompt
with such messages, a second tokenizer (`AliasedTokens`) shares the model of the first one, but does not have the
control tokens. It has an alias for each of them instead, and only texts of the chat template become aliases:

    rendered   <|im_start|>user\\nsay <|im_end|><|im_end|>\\n
    aliased    ALIAS-1user\\nsay <|im_end|>ALIAS-2\\n             ids: 1, user, \\n, say, <, |, im, ...

The aliases have the properties of the tokens (`lstrip`, `normalized`, ...), and the prompt is encoded as one text. So
all other text has the ids that it has in the first tokenizer."""

import re
import secrets
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import groupby, takewhile
from typing import Final

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend

LIKE_CONTROL: Final = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
"""Form of tokens that are control tokens even if the tokenizer does not call them special. DeepSeek's turns start with
such tokens."""
PIECE_CHARS: Final = 2**16
"""Number of characters that are searched at once: other threads cannot run during this time."""
MAX_SHORT: Final = 2048
"""Maximum number of characters that are not passed to the library as a batch of one. Only for a batch does
the library release the GIL."""

Span = tuple[int, int]
"""Start and end of a text of a control token in another text."""


class ControlTexts:
    """The texts of control tokens, and where they are in other texts."""

    def __init__(self, texts: Iterable[str]) -> None:
        known = sorted({text for text in texts if text})
        self.first_chars = frozenset(text[0] for text in known)
        self._pattern = re.compile(_any_of(known) if known else "(?!)")
        self._longest = max(map(len, known), default=0)
        self._prefixes = frozenset(text[:size] for text in known for size in range(1, len(text)))

    def find(self, text: str, *, except_at: Container[int] = ()) -> Iterator[Span]:
        """Yields start and end of each text of a control token, from left to right. `except_at`: positions at which
        a text is not reported, and not skipped."""
        position = piece_end = 0
        while self._longest and position < len(text):
            piece_end = max(piece_end, position) + PIECE_CHARS
            while found := self._pattern.search(text, position, piece_end + self._longest):
                start, end = found.span()
                if start >= piece_end:
                    break
                if start in except_at:
                    position = start + 1
                else:
                    position = end
                    yield start, end
            position = max(position, piece_end)

    def is_at(self, text: str, start: int) -> bool:
        return self._pattern.match(text, start) is not None

    def can_end_in(self, text: str) -> bool:
        """Returns True if a control token, or the start of one, is at the end of the text or inside."""
        return next(self.find(text), None) is not None or self.unfinished(text) is not None

    def unfinished(self, text: str) -> int | None:
        """Returns the start of the text of a control token that is cut by the end of `text`, or by white space there.
        None if there is no such text."""
        end = len(text.rstrip())
        for start in range(max(0, end - self._longest), end):
            if text[start] in self.first_chars and text[start:end] in self._prefixes:
                return start
        return None


def _any_of(texts: list[str]) -> str:
    """Returns a pattern for the longest of some texts, which are sorted. It is a tree, so the time for a character does
    not grow with their number."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(texts[0], texts[-1], strict=False)))
    rest = [text[same:] for text in texts]
    longer = [_any_of(list(group)) for _, group in groupby(filter(None, rest), key=lambda text: text[0])]
    return re.escape(texts[0][:same]) + (f"(?:{'|'.join(longer)}){'' if rest[0] else '?'}" if longer else "")


class ControlTokens:
    """The control tokens of a tokenizer. Thread-safe."""

    def __init__(self, backend: Backend, *, unknown: str | None = None) -> None:
        """`unknown`: text of the token for characters that the vocabulary lacks, which any text can contain."""
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._tokens = {
            token.content: (token_id, token)
            for token_id, token in added.items()
            if token.special or LIKE_CONTROL.fullmatch(token.content)
        }
        self.texts = ControlTexts(self._tokens)
        self.needs_aliases = backend.normalizer is not None and any(one.normalized for _, one in self._tokens.values())
        """True if the normalizer can turn other texts into texts of control tokens."""
        self._unknown = unknown
        self._divisible_ids = {
            token_id for text, (token_id, _) in self._tokens.items() if len(text) > 1 and text != unknown
        }

    @cached_property
    def _aliased(self) -> "AliasedTokens":
        return AliasedTokens(self._backend, self._tokens)

    def encode(self, text: str, *, as_text: Container[int] = (), add_special_tokens: bool = False) -> list[int]:
        """Returns the ids of a text. `as_text`: starts of the texts of control tokens that are only text."""
        aliased = self._aliased
        spans: Sequence[Span] = list(self.texts.find(text, except_at=as_text))
        while True:
            encoding, found = aliased.encode(text, spans, add_special_tokens=add_special_tokens)
            if len(found) == len(spans):
                break
            spans = found  # the others are part of a word, or have no such form after the normalizer
        own_ids = encoding.ids
        if not self._needs_texts(own_ids, encoding):
            return [aliased.real_id(own_id) for own_id in own_ids]
        # The texts of all tokens are made at once: for a million tokens, no other thread runs for 100 ms.
        tokens = encoding.tokens
        ids = [aliased.real_id(own_id, token) for own_id, token in zip(own_ids, tokens, strict=True)]
        # Either the tokenizer added the token to the text, or its model has the token like any other piece of text.
        added = encoding.special_tokens_mask
        return [part for i, token in enumerate(tokens) for part in self._as_pieces(ids[i], token, is_added=added[i])]

    def _needs_texts(self, own_ids: Sequence[int], encoding: Encoding) -> bool:
        """Returns True if a token can be a control token that the model made of a client's text, or if its id is not
        known without its text."""
        aliased, different = self._aliased, set(own_ids)
        if not aliased.ambiguous_ids.isdisjoint(different):
            return True
        made = {own_id for own_id in different - aliased.alias_ids if aliased.real_id(own_id) in self._divisible_ids}
        if not made:
            return False
        added = encoding.special_tokens_mask
        return any(own_id in made and not is_added for own_id, is_added in zip(own_ids, added, strict=True))

    def _as_pieces(self, token_id: int, token: str, *, is_added: int) -> list[int]:
        """Returns the ids of a token's text in several pieces if the model made a control token of a client's text."""
        if is_added or len(token) < 2 or token == self._unknown or self._tokens.get(token, (None,))[0] != token_id:
            return [token_id]
        model = self._backend.model
        pieces = [*model.tokenize(token[:1]), *model.tokenize(token[1:])]
        return [part for piece in pieces for part in self._as_pieces(piece.id, piece.value, is_added=0)]


class AliasedTokens:
    """A tokenizer whose control tokens have other texts, which no client knows."""

    def __init__(self, backend: Backend, control: Mapping[str, tuple[int, AddedToken]]) -> None:
        self._backend = Backend(backend.model)  # shares the vocabulary
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if (value := getattr(backend, part)) is not None:
                setattr(self._backend, part, value)
        secret = f"{secrets.randbelow(10**24):024}"
        self._names = {text: f"<q{secret}z{number}>" for number, text in enumerate(control)}
        """Aliases of control tokens, of characters that normalizers keep."""
        others = {i: token for i, token in backend.get_added_tokens_decoder().items() if token.content not in control}
        aliases = {token_id: _renamed(token, self._names[text]) for text, (token_id, token) in control.items()}
        added = aliases | others
        self._backend.add_tokens([added[token_id] for token_id in sorted(added)])
        own = self._backend.get_added_tokens_decoder()
        real = {token.content: token_id for token_id, token in added.items()}
        here = {own_id: real[token.content] for own_id, token in own.items()}
        self._real_ids = {own_id: token_id for own_id, token_id in here.items() if own_id != token_id}
        """Ids of added tokens in the first tokenizer. Those that are not in the model have other ids here."""
        self.alias_ids = {own_id for own_id, token_id in here.items() if token_id in aliases}
        self._ambiguous = {
            own_id: added[token_id].content
            for own_id, token_id in self._real_ids.items()
            if own_id not in added and backend.id_to_token(own_id) is not None
        }
        """Ids that tokens of the model have too, if the ids of the model are not consecutive."""

    @property
    def ambiguous_ids(self) -> Set[int]:
        return self._ambiguous.keys()

    def real_id(self, token_id: int, token: str | None = None) -> int:
        """Returns the id in the first tokenizer. `token`: text of the token; None if its id is not ambiguous."""
        if token is not None and token_id in self._ambiguous and self._ambiguous[token_id] not in token:
            return token_id
        return self._real_ids.get(token_id, token_id)

    def encode(self, text: str, spans: Sequence[Span], *, add_special_tokens: bool) -> tuple[Encoding, Sequence[Span]]:
        """Encodes a text with aliases in place of `spans`. Returns also the spans that became tokens."""
        pieces, end, length, starts = list[str](), 0, 0, dict[int, Span]()
        for span in spans:
            piece, alias = text[end : span[0]], self._names[text[slice(*span)]]
            starts[length + len(piece)] = span
            pieces += piece, alias
            end, length = span[1], length + len(piece) + len(alias)
        aliased = "".join([*pieces, text[end:]])
        if len(aliased) <= MAX_SHORT:
            encoding = self._backend.encode(aliased, add_special_tokens=add_special_tokens)
        else:
            encoding = self._backend.encode_batch([aliased], add_special_tokens=add_special_tokens)[0]
        found = [i for i, own_id in enumerate(encoding.ids) if own_id in self.alias_ids]
        if len(found) == len(spans):
            return encoding, spans
        inside = {position for i in found for position in range(*(encoding.token_to_chars(i) or (0, 0)))}
        return encoding, [span for start, span in starts.items() if start in inside]


def _renamed(token: AddedToken, content: str) -> AddedToken:
    flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
    return AddedToken(content, special=False, **flags)
