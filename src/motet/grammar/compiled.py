"""Grammars made ready for one model, and the matchers that follow the choices through them.

    Grammar ─► Grammars.get ─► CompiledGrammar ─► .matcher(written) ─► Matcher     one a choice, owned by it

Compiling costs milliseconds, a copy microseconds; so a grammar is compiled once and copied for each choice. A compiled
grammar has had its first mask filled: what that built is copied along.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from threading import Lock

from llguidance import LLMatcher, LLTokenizer

from motet.constraint import Grammar, GrammarKind
from motet.errors import GrammarError
from motet.grammar.blame import find_blamed
from motet.grammar.limits import parser_limits, with_deep_stack
from motet.grammar.schema import read_schema, wrong
from motet.grammar.source import llguidance_source, schema_source
from motet.grammar.vocabulary import build_vocabulary
from motet.text.tokenizer import Tokenizer

MAX_KEPT = 256
"""Compiled grammars of one model."""


MAX_WORDS = 300
"""Characters of what llguidance says, which may show a whole grammar."""

ONE_OF = (
    "it is not certain that the parts of 'oneOf' exclude one another; use 'anyOf', or give each part, as an object, a "
    "required property with a text ('const') of its own"
)
"""llguidance names an option that no client has."""


class Matcher:
    """How far one choice has come in its grammar. Not to be used by two threads at once."""

    def __init__(self, inner: LLMatcher, mask_words: int) -> None:
        self.inner = inner
        """llguidance's own; for `fill_masks`."""
        self.mask_words = mask_words
        """As llguidance counts them."""

    def consume(self, token_id: int) -> None:
        """The choice wrote this. Raises `GrammarError` if the grammar does not allow it, or has become too much work.

        The end-of-sequence that ends a choice need not be told."""
        if not self.inner.consume_token(token_id):
            raise self.failure()

    def failure(self) -> GrammarError:
        """Why this matcher is in its error state, from which it never comes back."""
        return GrammarError(f"The grammar cannot be followed any further: {why(self.inner)}")

    @property
    def stopped(self) -> bool:
        """Nothing but end-of-sequence may follow; for a model that has none, nothing at all."""
        return bool(self.inner.is_stopped())

    @property
    def accepting(self) -> bool:
        """What is written is whole; more may be allowed."""
        return bool(self.inner.is_accepting())


class CompiledGrammar:
    """One grammar for one model; never changed, so any thread may ask it."""

    def __init__(self, pristine: LLMatcher, mask_words: int) -> None:
        self._pristine = pristine
        self._mask_words = mask_words

    def matcher(self, written: Sequence[int] = ()) -> Matcher:
        """For a choice that wrote these tokens. Raises `GrammarError` if the grammar does not allow them."""
        inner = self._pristine.deep_copy()
        if written and not inner.consume_tokens(list(written)):
            raise GrammarError(f"What the choice has written does not follow its grammar: {why(inner)}")
        return Matcher(inner, self._mask_words)


class Grammars:
    """The compiled grammars of one model, the last ones kept. For any thread."""

    def __init__(
        self, tokenizer: Callable[[], Tokenizer], *, vocab_size: int, eos_token_ids: Sequence[int], keep: int = MAX_KEPT
    ) -> None:
        """`tokenizer` is asked for at the first grammar."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._keep = keep
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._kept_lock = Lock()
        self._vocabulary: LLTokenizer | None = None
        self._special: dict[str, int] = {}
        self._vocabulary_lock = Lock()

    def kept(self, grammar: Grammar) -> CompiledGrammar | None:
        """If it is there already; never waits for another that is being compiled."""
        with self._kept_lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
        return found

    def get(self, grammar: Grammar) -> CompiledGrammar:
        """Blocks for as long as it takes to compile, without the GIL. Raises `GrammarError`."""
        found = self.kept(grammar)
        if found is not None:
            return found
        compiled = self._compile(grammar)
        with self._kept_lock:
            self._kept[grammar] = compiled
            while len(self._kept) > self._keep:
                self._kept.popitem(last=False)
        return compiled

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        vocabulary = self._built_vocabulary()
        pristine = _begun(vocabulary, llguidance_source(grammar, self._special))
        if pristine.is_error():
            raise self._refusal(grammar, why(pristine))
        return CompiledGrammar(pristine, (vocabulary.vocab_size + 31) // 32)

    def _refusal(self, grammar: Grammar, said: str) -> GrammarError:
        if grammar.kind is not GrammarKind.JSON:
            return GrammarError(said)
        vocabulary = self._built_vocabulary()

        def fault(part: Mapping[str, object]) -> str | None:
            tried = _begun(vocabulary, schema_source(part))
            return why(tried) if tried.is_error() else None

        return wrong(*find_blamed(read_schema(grammar.source), said, fault))

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


def _begun(vocabulary: LLTokenizer, source: str) -> LLMatcher:
    """Compiled, and its first mask filled; what went wrong is in it."""
    made: list[LLMatcher] = []

    def work() -> None:
        matcher = LLMatcher(vocabulary, source, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        made.append(matcher)

    with_deep_stack(work)
    return made[0]


def why(matcher: LLMatcher) -> str:
    """What a matcher in its error state says, from which it never comes back: in one line, without its state."""
    lines = matcher.get_error().removesuffix("<non-verbose/>").strip().split("\n")
    said = next((line for line in lines if line.startswith("error: ")), lines[0]).removeprefix("error: ")
    if "coerce_one_of" in said:
        return ONE_OF
    return "nothing satisfies it" if said.startswith("NoExtension") else said[:MAX_WORDS]
