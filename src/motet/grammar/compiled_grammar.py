"""Compiles grammars for one model, and makes a matcher for each choice that follows one.

    Grammar ─► Grammars.get ─► CompiledGrammar ─► .matcher(output_tokens) ─► Matcher ─► fill_masks

1. The first grammar of a model builds the vocabulary: the bytes of every token, and which tokens are special.
2. Compiling takes milliseconds and copying microseconds, so a grammar is compiled once and copied for each choice. Its
   first mask is filled before it is copied, so that the copies contain the state that this builds.
3. Each step fills a row of bits for each choice, and the matcher of each choice consumes the sampled token.
4. llguidance does not report where a schema is invalid. After an error, parts of the schema are compiled one by one to
   find the place.
"""

import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from threading import Lock
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from motet.errors import GrammarError
from motet.grammar.grammar_source import llguidance_source, schema_source
from motet.grammar.limits import MAX_TOKEN_S, PARSER_LIMITS, compiled_mb, with_deep_stack
from motet.grammar.schema.client_schema import read_schema
from motet.grammar.schema.keywords import PREFIX, Path, SchemaPath, dict_at, inner_schemas, schema_error
from motet.text.tokenizer import Tokenizer
from motet.types import Grammar, GrammarKind

MAX_CACHED_MB: Final = 512
"""Maximum memory of the compiled grammars that are cached for one model, estimated by `limits.compiled_mb`."""
MAX_ERROR_CHARS: Final = 300
"""Maximum length of an error of llguidance, which can contain a complete grammar. Longer errors are truncated."""
TRIED_TOKENS: Final = 8
"""Number of tokens, not counting forced ones, for which a newly compiled grammar is followed, to find its errors."""
LEXER_ERROR: Final = "lexer error"
"""Start of the errors after which no copy of a matcher can continue."""
TOO_MANY_STATES: Final = "too many states"
"""Part of the error of a lexer that all choices together have filled."""
MAX_REPLAY_S: Final = 0.25
"""Maximum time in a step, in seconds, in which choices continue with another lexer. They consume their output tokens
again for it."""
TOO_LONG_TO_REPLAY: Final = (
    "The grammar cannot be followed any further: another choice with this grammar has exceeded a limit, and it would "
    "take too long to continue without it"
)
TOO_SLOW: Final = (
    f"The grammar cannot be followed any further: it is so ambiguous that a token takes more than {MAX_TOKEN_S:g} s"
)
MAX_TRIES: Final = 100
"""Maximum number of parts that the search for the invalid part of a schema compiles."""
MAX_TRY_SECONDS: Final = 1.0
"""Maximum duration of this search."""
WHOLE: Final = "whole-schema--"
"""Name of the definition with the whole schema in a part of the schema, so that references in the part can be
resolved."""


class Matcher:
    """The position of one choice in its grammar. It is not thread-safe."""

    def __init__(self, grammar: "CompiledGrammar", tokens: Sequence[int] = ()) -> None:
        """Raises `GrammarError` if the grammar does not allow the tokens."""
        self._grammar = grammar
        self.tokens = list(tokens)
        """The tokens so far."""
        self.token_s = 0.0
        """Time of the last token: to fill its mask, and to consume it."""
        self.mask_cpu_s = 0.0
        """CPU time of the last mask. Other programs do not change it."""
        self._replay_s = 0.0
        """Time to consume all tokens again."""
        self._is_too_long = False
        """True if that would take too long."""
        self._start()

    def _start(self) -> None:
        """Makes a new copy of the grammar's initial matcher, and consumes the tokens so far."""
        self._lexer = self._grammar.lexer()
        self.inner = self._lexer.initial.deep_copy()
        """llguidance's own matcher, for `fill_masks`."""
        start_s = time.perf_counter()
        consumed = not self.tokens or self.inner.consume_tokens(self.tokens)
        self._replay_s = time.perf_counter() - start_s
        if not consumed:
            self._note_failure()
            raise GrammarError(f"The output tokens of the choice do not follow its grammar: {_error_of(self.inner)}")

    def consume(self, token_id: int) -> None:
        """Advances by an output token of the choice. The end-of-sequence token that ends a choice can be omitted.
        Raises `GrammarError` if the grammar does not allow the token, or has exceeded a limit."""
        start_s = time.perf_counter()
        consumed = self.inner.consume_token(token_id)
        if not consumed and self._recover(MAX_REPLAY_S):
            start_s = time.perf_counter()
            consumed = self.inner.consume_token(token_id)
        if not consumed:
            self._note_failure()
            raise self.error()
        self.tokens.append(token_id)
        spent_s = time.perf_counter() - start_s
        self.token_s += spent_s
        self._replay_s += spent_s

    def mask(self, *, max_replay_s: float = MAX_REPLAY_S) -> bytes:
        """Returns the bits of the tokens that can follow. They have no meaning if the matcher then has an error.
        `max_replay_s`: maximum time to continue with another lexer."""
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        bits = self.inner.compute_bitmask()
        if self.inner.is_error() and self._recover(max_replay_s):
            start_s, start_cpu_s = time.perf_counter(), time.thread_time()
            bits = self.inner.compute_bitmask()
        if self.inner.is_error():
            self._note_failure()
        self.token_s, self.mask_cpu_s = time.perf_counter() - start_s, time.thread_time() - start_cpu_s
        return bits

    def copy(self) -> "Matcher":
        other = copy(self)
        other.inner, other.tokens = self.inner.deep_copy(), [*self.tokens]
        return other

    def forced(self) -> list[int]:
        """Returns the next tokens as long as the grammar allows only one token at each position. The list can end
        before the last such token."""
        if self.inner.is_error():
            return []
        tokens = [*map(int, self.inner.compute_ff_tokens())]
        if self.inner.is_error():
            self._note_failure()
        return tokens

    def error(self) -> GrammarError:
        """Returns the error of this matcher. A matcher with an error cannot continue."""
        if self._is_too_long:
            return GrammarError(TOO_LONG_TO_REPLAY)
        return GrammarError(f"The grammar cannot be followed any further: {_error_of(self.inner)}")

    @property
    def expected_s(self) -> float:
        """Expected time of the next token: the time of the last one, and the time to consume all tokens again if the
        lexer has failed."""
        return self.token_s + (self._replay_s if self._lexer.failed else 0.0)

    @property
    def accepting(self) -> bool:
        """True if the tokens so far are a complete answer, although more can follow."""
        return bool(self.inner.is_accepting())

    @property
    def stopped(self) -> bool:
        """True if only end-of-sequence can follow; for a model without end-of-sequence, if nothing can follow."""
        return bool(self.inner.is_stopped())

    def _note_failure(self) -> None:
        """Called at an error. If it is the lexer's, no choice uses this lexer again."""
        if _error_of(self.inner).startswith(LEXER_ERROR):
            self._lexer.failed = True

    def _recover(self, max_replay_s: float) -> bool:
        """Continues with another lexer if the error is not this choice's own: another choice has made the shared lexer
        fail, or all choices together have filled it. Returns False if the error is this choice's own, or if the output
        tokens would take longer than `max_replay_s`."""
        error = _error_of(self.inner)
        if not error.startswith(LEXER_ERROR):
            return False
        if not self._lexer.failed:
            self._lexer.failed = True
            if TOO_MANY_STATES not in error:
                return False
        if self._replay_s > max_replay_s:
            self._is_too_long = True
            return False
        failed = self.inner
        try:
            self._start()
        except GrammarError:
            self.inner = failed
        return self.inner is not failed


class SharedLexer:
    """An initial matcher. llguidance shares the lexer of a matcher with all copies: what one copy learns, the others
    need not compute, and after an error of the lexer, all of them fail."""

    def __init__(self, initial: LLMatcher) -> None:
        self.initial = initial
        """A matcher without any tokens."""
        self.failed = False


class CompiledGrammar:
    """One grammar for one model. Thread-safe."""

    def __init__(self, initial: LLMatcher, *, compile_again: Callable[[], LLMatcher]) -> None:
        self._lexer = SharedLexer(initial)
        self._compile_again = compile_again
        self._lock = Lock()

    def lexer(self) -> SharedLexer:
        """Returns a lexer that has not failed. It can take the time to compile the grammar."""
        with self._lock:
            if self._lexer.failed:
                self._lexer = SharedLexer(self._compile_again())
            return self._lexer

    def matcher(self, output_tokens: Sequence[int] = ()) -> Matcher:
        """Makes a matcher for a choice with these output tokens. Raises `GrammarError` if they are not allowed."""
        return Matcher(self, output_tokens)


class Grammars:
    """The compiled grammars of one model, with a cache of the most recently used ones. Thread-safe."""

    def __init__(
        self,
        tokenizer: Callable[[], Tokenizer],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_cached_mb: int = MAX_CACHED_MB,
    ) -> None:
        """`tokenizer` is called when the first grammar is compiled. `vocab_size` is the width of the model's logits."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._max_cached_mb = max_cached_mb
        self._cache: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        """Compiled grammars, the least recently used first."""
        self._cached_mb = 0
        self._cache_lock = Lock()
        self._vocabulary: LLTokenizer | None = None
        self._special: dict[str, int] = {}
        """Ids of special tokens by their texts."""
        self._vocabulary_lock = Lock()

    def cached(self, grammar: Grammar) -> CompiledGrammar | None:
        """Returns the compiled grammar if it is in the cache. Never waits for a grammar that is being compiled."""
        with self._cache_lock:
            if (found := self._cache.get(grammar)) is not None:
                self._cache.move_to_end(grammar)
        return found

    def get(self, grammar: Grammar) -> CompiledGrammar:
        """Returns the compiled grammar. Compiling blocks, without the GIL. Raises `GrammarError`."""
        if (found := self.cached(grammar)) is not None:
            return found
        compiled = self._compile(grammar)
        with self._cache_lock:
            if grammar not in self._cache:
                self._cached_mb += compiled_mb(grammar)
            self._cache[grammar] = compiled
            while self._cached_mb > self._max_cached_mb:
                self._cached_mb -= compiled_mb(self._cache.popitem(last=False)[0])
        return compiled

    def evict(self, grammar: Grammar) -> None:
        with self._cache_lock:
            if self._cache.pop(grammar, None) is not None:
                self._cached_mb -= compiled_mb(grammar)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        vocabulary = self._built_vocabulary()
        source = llguidance_source(grammar, self._special)
        initial = _compiled(vocabulary, source)
        error = self._error_at_start(initial)
        if error is None:
            return CompiledGrammar(initial, compile_again=partial(_compiled, vocabulary, source))
        if grammar.kind is not GrammarKind.JSON:
            raise GrammarError(error)

        def error_in(part: Mapping[str, object]) -> str | None:
            return self._error_at_start(_compiled(vocabulary, schema_source(part)))

        raise schema_error(*find_invalid_part(read_schema(grammar.source), error, error_in=error_in))

    def _error_at_start(self, initial: LLMatcher) -> str | None:
        """Returns the error of a compiled grammar: to compile it, or to follow it for a few tokens. A grammar
        that fails this early exceeds a limit in nearly every answer. None means that there is no error."""
        if initial.is_error():
            return _error_of(initial)
        matcher = initial.deep_copy()
        for _ in range(TRIED_TOKENS):
            matcher.consume_tokens(matcher.compute_ff_tokens())
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                return _error_of(matcher)
            allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            allowed[list(self._eos_token_ids)] = 0
            last = len(allowed) - 1 - int(allowed[::-1].argmax())
            if not allowed[last]:
                return None
            matcher.consume_token(last)  # the first one is often white space
        return None

    def _built_vocabulary(self) -> LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                tokenizer, size = self._tokenizer(), self._vocab_size
                self._special = {text: token for text, token in tokenizer.special_tokens.items() if token < size}
                self._vocabulary = build_vocabulary(tokenizer, vocab_size=size, eos_token_ids=self._eos_token_ids)
        return self._vocabulary


def mask_words(vocab_size: int) -> int:
    return (vocab_size + 31) // 32


def fill_masks(matchers: Sequence[Matcher], out: NDArray[np.int32]) -> dict[int, GrammarError]:
    """Sets row i of `out` to the tokens that matcher i allows: bit `t % 32` of word `t // 32` is token t. Returns the
    errors of failed matchers by row; a grammar that exceeds a limit fails only its own choice, and its row has no
    meaning.

    `out`: [len(matchers) or more, mask_words(vocab_size)] int32. All matchers are for one model. They run sequentially:
    a mask takes microseconds, and parallel threads are faster only from 64 masks on."""
    errors: dict[int, GrammarError] = {}
    left_s = MAX_REPLAY_S
    for row, matcher in enumerate(matchers):
        before_s = time.perf_counter()
        # For a model without end-of-sequence, llguidance gets an id for it after the last token, which can be in a word
        # that `out` does not have.
        out[row] = np.frombuffer(matcher.mask(max_replay_s=left_s), np.int32)[: out.shape[1]]
        left_s -= max(0.0, time.perf_counter() - before_s - matcher.token_s)
        if matcher.inner.is_error():
            errors[row] = matcher.error()
        elif matcher.mask_cpu_s > MAX_TOKEN_S:
            errors[row] = GrammarError(TOO_SLOW)
    return errors


def _compiled(vocabulary: LLTokenizer, source: str) -> LLMatcher:
    """Returns a matcher whose first mask was filled, or a matcher in its error state."""

    def work() -> LLMatcher:
        matcher = LLMatcher(vocabulary, source, log_level=0, limits=PARSER_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher

    return with_deep_stack(work)


def _error_of(matcher: LLMatcher) -> str:
    """Returns the error of a matcher as one line, without the parser state that llguidance adds."""
    lines = matcher.get_error().removesuffix("<non-verbose/>").strip().split("\n")
    error = next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")
    return "no value is valid" if error.startswith("NoExtension") else error[:MAX_ERROR_CHARS]


def find_invalid_part(
    root: Mapping[str, object],
    error: str,
    *,
    error_in: Callable[[Mapping[str, object]], str | None],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Path, str]:
    """Returns the path of the deepest part of `root` that fails alone, and its error.

    The search goes from the root down: if a schema inside a failing part fails alone, the search continues in that
    schema. It ends after `MAX_TRIES` parts or `MAX_TRY_SECONDS` with the deepest part found so far. `error_in` returns
    llguidance's error for a schema, or None if it compiles."""
    whole = _redirected(root)
    defs = {**dict_at(whole, "$defs"), WHOLE: whole}
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
            found = error_in({**_redirected(inner.schema), "$defs": defs})
            if found is not None and (deeper is None or found == error):
                deeper = SchemaPath((*place.path, *inner.path), inner.schema), found
            if found == error:
                break
        if deeper is None:
            return (*place.path, *_invalid_keyword(place.schema, error, error_in=error_in)), error
        place, error = deeper


def _invalid_keyword(
    schema: object, error: str, *, error_in: Callable[[Mapping[str, object]], str | None]
) -> Sequence[str]:
    """Returns the keyword with an invalid regular expression, or nothing if another keyword causes the error."""
    for key in ("pattern", "patternProperties"):
        if isinstance(schema, dict) and key in schema:
            value = schema[key]
            alone = {key: dict.fromkeys(value, True) if isinstance(value, dict) else value}
            if error_in(alone) == error:
                return [key]
    return []


def _redirected(schema: Mapping[str, object]) -> dict[str, object]:
    """Returns a schema whose references to the whole schema lead to the definition `WHOLE`."""

    def inner(value: object, key: str) -> object:
        if key == "$ref" and value == "#":
            return PREFIX + WHOLE
        if isinstance(value, dict):
            return {name: inner(each, name) for name, each in value.items()}
        return [inner(each, "") for each in value] if isinstance(value, list) else value

    return {key: inner(value, key) for key, value in schema.items()}


class _TokenizerAdapter:
    """A tokenizer with the interface that `TokenizerWrapper` requires."""

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], *, special: list[int], eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        tags = [tag for tag in tokenizer.special_tokens if len(tag) > 1]
        after_first_character = [f"(?<={re.escape(tag[:1])})(?={re.escape(tag[1:])})" for tag in tags]
        self._in_tags = re.compile("|".join(after_first_character) or "(?!)")
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos_token_id
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        """Called by llguidance where a grammar allows only one text. If the text contains a tag, it is split after the
        first character of the tag, because the tokenizer would otherwise return the special token."""
        pieces = self._in_tags.split(text if isinstance(text, str) else text.decode(errors="replace"))
        return [token for piece in pieces for token in self._tokenizer.encode(piece, add_special_tokens=False)]


def build_vocabulary(tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Builds the vocabulary, in about a tenth of a second for 50,000 tokens.

    Ids of the model that the tokenizer does not have are without text, and never allowed. Ids of the tokenizer that the
    model does not have are left out. For a model without end-of-sequence, an id for it is added after the last token.
    Masks have no bit for this id, so the mask is empty where the grammar allows nothing else."""
    eos = [token for token in eos_token_ids if token < vocab_size] or [vocab_size]
    size = max(vocab_size, eos[0] + 1)
    known = min(vocab_size, tokenizer.vocab_size)
    tokens = [tokenizer.token_bytes(token) for token in range(known)] + [b""] * (size - known)
    special = sorted({token for token in tokenizer.special_ids if token < known} | set(eos))
    for token in eos:
        tokens[token] = tokens[token] or b"<eos>"
    adapter = _TokenizerAdapter(tokenizer, tokens, special=special, eos_token_id=eos[0])
    return LLTokenizer(TokenizerWrapper(adapter), n_vocab=size, eos_token=eos)
