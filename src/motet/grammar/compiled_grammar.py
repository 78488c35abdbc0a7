"""Compiles grammars for one model, and makes the matchers that follow choices through them.

    Grammar ─► Grammars.get ─► CompiledGrammar ─► .matcher(written) ─► Matcher ─► fill_masks     one matcher a choice

1. The first grammar of a model builds the vocabulary: the bytes of every token, and which tokens are no text.
2. Compiling takes milliseconds and copying microseconds, so a grammar is compiled once and copied for each choice. Its
   first mask is filled before it is copied, so that copies contain what that built.
3. Each step fills a row of bits for each choice, and each choice's matcher consumes the token that was drawn.
4. llguidance does not say where a schema is wrong, so after an error its parts are tried one by one.
"""

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from motet.errors import GrammarError
from motet.grammar.grammar_source import llguidance_source, read_schema, schema_source
from motet.grammar.json_schema import Path, SchemaPath, inner_schemas, wrong
from motet.grammar.limits import PARSER_LIMITS, kept_mb, with_deep_stack
from motet.text.tokenizer import Tokenizer
from motet.types import Grammar, GrammarKind

MAX_KEPT_MB: Final = 512
"""Memory of the compiled grammars that are kept for one model, by `limits.kept_mb`."""
MAX_ERROR_CHARS: Final = 300
"""An error of llguidance is cut to this many characters, since it may contain a whole grammar."""
ONE_OF: Final = (
    "it is not certain that the parts of 'oneOf' exclude one another; use 'anyOf', or give each part, as an object, a "
    "required property with a text ('const') of its own"
)
"""Replaces an error of llguidance that names an option which no client has."""

MAX_TRIES: Final = 100
MAX_TRY_SECONDS: Final = 1.0
"""Limits on the search for the wrong part of a schema."""
WHOLE: Final = "x-whole-schema"
"""The name under which a part of a schema contains the whole schema, so that references keep their meaning."""


class Matcher:
    """The position of one choice in its grammar. Two threads must not use it at once."""

    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner
        """llguidance's own matcher, for `fill_masks`."""

    def consume(self, token_id: int) -> None:
        """Moves on by a token that the choice has written. The end-of-sequence that ends a choice may be left out.

        Raises `GrammarError` if the grammar does not allow the token, or has become too much work."""
        if not self.inner.consume_token(token_id):
            raise self.failure()

    def copy(self) -> "Matcher":
        return Matcher(self.inner.deep_copy())

    def forced(self) -> list[int]:
        """Returns tokens that must come next, one after the other, as each mask would allow nothing else; maybe not all
        such tokens."""
        return [] if self.inner.is_error() else [*map(int, self.inner.compute_ff_tokens())]

    def failure(self) -> GrammarError:
        """Returns the error of this matcher, which it cannot recover from."""
        return GrammarError(f"The grammar cannot be followed any further: {_error_of(self.inner)}")

    @property
    def stopped(self) -> bool:
        """True if only end-of-sequence may follow, or nothing for a model without that."""
        return bool(self.inner.is_stopped())


class CompiledGrammar:
    """One grammar for one model. It never changes, so any thread may use it."""

    def __init__(self, pristine: LLMatcher) -> None:
        self._pristine = pristine

    def matcher(self, written: Sequence[int] = ()) -> Matcher:
        """Makes a matcher for a choice that has these output tokens. Raises `GrammarError` if they are not allowed."""
        inner = self._pristine.deep_copy()
        if written and not inner.consume_tokens(list(written)):
            raise GrammarError(f"The written part of the choice does not follow its grammar: {_error_of(inner)}")
        return Matcher(inner)


class Grammars:
    """The compiled grammars of one model; keeps those that were used last. Any thread may use it."""

    def __init__(
        self,
        tokenizer: Callable[[], Tokenizer],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        keep_mb: int = MAX_KEPT_MB,
    ) -> None:
        """`tokenizer` is called at the first grammar. `vocab_size`: the width of the model's logits."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._keep_mb = keep_mb
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._kept_mb = 0
        self._kept_lock = Lock()
        self._vocabulary: LLTokenizer | None = None
        self._special: dict[str, int] = {}
        self._vocabulary_lock = Lock()

    def kept(self, grammar: Grammar) -> CompiledGrammar | None:
        """Returns the grammar if it is compiled already; never waits for one that is being compiled."""
        with self._kept_lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
        return found

    def get(self, grammar: Grammar) -> CompiledGrammar:
        """Returns the compiled grammar. Compiling blocks, without the GIL. Raises `GrammarError`."""
        found = self.kept(grammar)
        if found is not None:
            return found
        compiled = self._compile(grammar)
        with self._kept_lock:
            if grammar not in self._kept:
                self._kept_mb += kept_mb(grammar)
            self._kept[grammar] = compiled
            while self._kept_mb > self._keep_mb:
                self._kept_mb -= kept_mb(self._kept.popitem(last=False)[0])
        return compiled

    def forget(self, grammar: Grammar) -> None:
        """Frees a compiled grammar, if it is kept."""
        with self._kept_lock:
            if self._kept.pop(grammar, None) is not None:
                self._kept_mb -= kept_mb(grammar)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        vocabulary = self._built_vocabulary()
        pristine = _compiled(vocabulary, llguidance_source(grammar, self._special))
        if not pristine.is_error():
            return CompiledGrammar(pristine)
        error = _error_of(pristine)
        if grammar.kind is not GrammarKind.JSON:
            raise GrammarError(error)

        def error_in(part: Mapping[str, object]) -> str | None:
            tried = _compiled(vocabulary, schema_source(part))
            return _error_of(tried) if tried.is_error() else None

        raise wrong(*find_wrong_part(read_schema(grammar.source), error, error_in=error_in))

    def _built_vocabulary(self) -> LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                tokenizer = self._tokenizer()
                special = tokenizer.special_tokens.items()
                self._special = {text: token for text, token in special if token < self._vocab_size}
                self._vocabulary = build_vocabulary(
                    tokenizer, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids
                )
        return self._vocabulary


def mask_words(vocab_size: int) -> int:
    return (vocab_size + 31) // 32


def fill_masks(matchers: Sequence[Matcher], out: NDArray[np.int32]) -> dict[int, GrammarError]:
    """Sets row i of `out` to the tokens that matcher i allows: bit `t % 32` of word `t // 32` is token t.

    `out`: [len(matchers) or more, mask_words(vocab_size)] int32. All matchers are for one model. They run one after the
    other: a mask takes microseconds, and other threads pay only from 64 masks on.

    Returns row -> error for those that failed: a grammar that became too much work fails its own choice only. The bits
    of such a row mean nothing.
    """
    for row, matcher in enumerate(matchers):
        # A model without end-of-sequence gets an id for it after its last one, sometimes in a word that `out` lacks.
        out[row] = np.frombuffer(matcher.inner.compute_bitmask(), np.int32)[: out.shape[1]]
    return {row: matcher.failure() for row, matcher in enumerate(matchers) if matcher.inner.is_error()}


def _compiled(vocabulary: LLTokenizer, source: str) -> LLMatcher:
    """Returns a matcher with its first mask filled, or one in its error state."""

    def work() -> LLMatcher:
        matcher = LLMatcher(vocabulary, source, log_level=0, limits=PARSER_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher

    return with_deep_stack(work)


def _error_of(matcher: LLMatcher) -> str:
    """Returns the error of a matcher in one line, without its state."""
    lines = matcher.get_error().removesuffix("<non-verbose/>").strip().split("\n")
    error = next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")
    if "coerce_one_of" in error:
        return ONE_OF
    return "nothing satisfies it" if error.startswith("NoExtension") else error[:MAX_ERROR_CHARS]


def find_wrong_part(
    root: Mapping[str, object],
    error: str,
    *,
    error_in: Callable[[Mapping[str, object]], str | None],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Path, str]:
    """Returns the deepest part of `root` that fails by itself, and its error.

    The search goes from the top down: if a part fails, and a schema inside it fails alone, that one is wrong. It ends
    after `MAX_TRIES` parts or `MAX_TRY_SECONDS` with the deepest part found so far. `error_in` returns llguidance's
    error for a schema, or None if it compiles.
    """
    whole = _into_whole(root)
    deadline = clock() + MAX_TRY_SECONDS
    place, tries = SchemaPath((), root), MAX_TRIES
    while True:
        deeper: tuple[SchemaPath, str] | None = None
        for inner in inner_schemas(place.schema):
            if not isinstance(inner.schema, dict):
                continue
            if tries == 0 or clock() > deadline:
                return place.path, error
            tries -= 1
            part = {key: _into_whole(value, key) for key, value in inner.schema.items()}
            found = error_in({**part, WHOLE: whole})
            if found is not None and (deeper is None or found == error):
                deeper = SchemaPath((*place.path, *inner.path), inner.schema), found
            if found == error:
                break
        if deeper is None:
            return place.path, error
        place, error = deeper


def _into_whole(value: object, key: str = "") -> object:
    """Returns a schema, or the value of `key`, with every reference changed to point into the whole schema."""
    if key == "$ref" and isinstance(value, str):  # not a string: a property of that name
        return f"#/{WHOLE}" if value in ("#", "#/") else f"#/{WHOLE}/{value[2:]}"
    if isinstance(value, dict):
        return {name: _into_whole(inner, name) for name, inner in value.items()}
    return [_into_whole(inner) for inner in value] if isinstance(value, list) else value


class _Entries:
    """A tokenizer in the form that `TokenizerWrapper` reads."""

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], *, special: list[int], eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        tags = [tag for tag in tokenizer.special_tokens if len(tag) > 1]
        behind_first = [f"(?<={re.escape(tag[:1])})(?={re.escape(tag[1:])})" for tag in tags]
        self._in_tags = re.compile("|".join(behind_first) or "(?!)")
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos_token_id
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        """Called where a grammar allows only one text. The text of a special token must stay text, so it is cut in two:
        otherwise the tokenizer would return the token."""
        plain = text if isinstance(text, str) else text.decode(errors="replace")
        pieces = self._in_tags.split(plain)
        return [token for piece in pieces for token in self._tokenizer.encode(piece, add_special_tokens=False)]


def build_vocabulary(tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Builds the vocabulary in about a tenth of a second for 50,000 entries.

    Ids after the tokenizer's entries have no text and are never allowed; entries after the model's ids do not exist. A
    model without end-of-sequence gets an id for it after its last one. Masks have no bit for that id, so where a
    grammar allows nothing else the mask is empty.
    """
    eos = [token for token in eos_token_ids if token < vocab_size] or [vocab_size]
    size = max(vocab_size, eos[0] + 1)
    known = min(vocab_size, tokenizer.vocab_size)
    tokens = [tokenizer.token_bytes(token) for token in range(known)] + [b""] * (size - known)
    special = sorted({token for token in tokenizer.special_ids if token < known} | set(eos))
    for token in eos:
        tokens[token] = tokens[token] or b"<eos>"
    entries = _Entries(tokenizer, tokens, special=special, eos_token_id=eos[0])
    return LLTokenizer(TokenizerWrapper(entries), n_vocab=size, eos_token=eos)
