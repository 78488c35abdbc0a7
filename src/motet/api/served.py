"""The models that a server answers for, by the names that clients use: one on a server, several on a gateway.

ServedModel   token ids reach its engine: text becomes tokens here, and tokens text
TextModel     other servers take its texts as they are; requests pass through
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial

import msgspec

from motet.engine import Engine
from motet.engines.upstream.text_source import TextGenerate
from motet.errors import GrammarError, ModelNotFoundError, NoWorkerError, OverloadedError, RequestError
from motet.grammar.compiled_grammar import Grammars
from motet.grammar.limits import is_heavy
from motet.grammar.trial import try_apart
from motet.settings.server_config import ServerConfig
from motet.text.formats import ModelFormats
from motet.text.prepare import PromptPreparer
from motet.text.template import ChatTemplate
from motet.text.tokenizer import Tokenizer
from motet.types import EngineInfo, Grammar

NUM_THREADS = 2
TIMEOUT_S = 5.0
HEAVY_TIMEOUT_S = 30.0
MAX_UNDER_WAY = 32
"""At most this many new light grammars of a model are compiled or wait for a thread at a time."""
MAX_HEAVY_UNDER_WAY = 8
MAX_REFUSED = 1024
"""Heavy grammars whose refusal is remembered."""
TOO_MANY = "Too many new grammars are being compiled; try again."


def now_s() -> int:
    return int(time.time())


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model that is asked in tokens."""

    name: str
    """The name that clients use."""
    engine: Engine
    """Where its groups go; at times no worker may be up."""
    placed: Engine | None = None
    """Where groups go that a gateway has given to this server and moves itself; None: to `engine`."""
    tokenizer: Tokenizer
    template: ChatTemplate
    formats: ModelFormats
    """How its answers mark thoughts and calls of tools."""
    root: str | None = None
    """Where it comes from; None: as its engine calls it."""
    parent: str | None = None
    """The name of the model that an adapter adapts; None: it is no adapter."""
    created: int = field(default_factory=now_s)

    @property
    def info(self) -> EngineInfo:
        """Has the limits of the workers there are now. Raises `NoWorkerError` if there has never been one."""
        return self.engine.info

    @property
    def preparer(self) -> PromptPreparer:
        """Makes prompts, within the same limits. Must be read on the event loop, and may be used in any thread."""
        return PromptPreparer(self.tokenizer, self.template, info=self.info)

    @cached_property
    def grammars(self) -> "GrammarChecks":
        """Made when the first request has a grammar."""
        vocab_size, eos_token_ids = self.info.vocab_size, self.info.eos_token_ids
        grammars = Grammars(lambda: self.tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        apart = partial(try_apart, tokenizer=self.tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        return GrammarChecks(grammars, try_apart=apart)

    def max_group(self, config: ServerConfig) -> int:
        """Returns the most choices that one prompt may have."""
        return min(config.max_n, self.info.max_num_seqs)


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A model that is asked in texts, elsewhere."""

    name: str
    root: str
    created: int
    max_model_len: int | None
    """None: the server did not say."""
    generate: TextGenerate
    parent: str | None = None
    """The name of the model that an adapter adapts; None: it is no adapter."""


Models = Callable[[], Mapping[str, ServedModel | TextModel]]
"""Returns the models of a server in the order in which they came; on a gateway they come and go with their workers."""


def one_model(
    name: str,
    engine: Engine,
    *,
    tokenizer: Tokenizer,
    formats: ModelFormats | None = None,
    placed: Engine | None = None,
) -> Models:
    """Returns the models of a server that has one model all its life. `formats`: None for those that the chat template
    is known by."""
    template = ChatTemplate.of(tokenizer)
    formats = formats or ModelFormats.of(tokenizer, template.source)
    model = ServedModel(
        name=name, engine=engine, placed=placed, tokenizer=tokenizer, template=template, formats=formats
    )
    return lambda: {name: model}


def model_named(models: Mapping[str, ServedModel | TextModel], name: str | None) -> ServedModel | TextModel:
    """Returns the model that a request names; it may leave `model` out if there is only one. Raises
    `ModelNotFoundError` for a name nobody has, `RequestError` for none of several, `NoWorkerError` for no model."""
    found = None if name is None else models.get(name)
    if found is not None:
        return found
    known = list(models.values())
    if not known:
        raise NoWorkerError("No model is served at this moment: no worker has come yet that has one.")
    if name is not None:
        raise ModelNotFoundError(
            f"The model `{name}` does not exist or you do not have access to it. {_listed(known)}", param="model"
        )
    if len(known) > 1:
        raise RequestError(
            f"Missing required parameter: 'model'. This server has several. {_listed(known)}",
            param="model",
            code="missing_required_parameter",
        )
    return known[0]


def _listed(known: Sequence[ServedModel | TextModel]) -> str:
    return f"Available here: {', '.join(f'`{model.name}`' for model in known)}."


class GrammarChecks:
    """Compiles grammars before their groups are let in, so that a client hears at once what is wrong with one.

        grammar ── known? ──► on
            ├─ light ──► one of a few threads ──► on, or 400
            └─ heavy ──► a thread of its own kind: first a process compiles it (`trial`), then the thread

    Compiling cannot be interrupted, so a thread that takes too long runs on to its end: its work is bounded, and other
    requests for the same grammar wait for the same thread. Its result is not kept, since the grammar was refused."""

    def __init__(
        self,
        grammars: Grammars,
        *,
        try_apart: Callable[[Grammar], None],
        timeout_s: float = TIMEOUT_S,
        heavy_timeout_s: float = HEAVY_TIMEOUT_S,
    ) -> None:
        """`try_apart`: compiles a heavy grammar in a process, and raises its error."""
        self._grammars = grammars
        self._try_apart = try_apart
        self._light = CompileThreads(NUM_THREADS, timeout_s=timeout_s, most=MAX_UNDER_WAY)
        self._heavy = CompileThreads(1, timeout_s=heavy_timeout_s, most=MAX_HEAVY_UNDER_WAY)
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        """Digest of a heavy grammar -> its error, so that it is not tried again."""

    async def check(self, grammar: Grammar, *, called: str, param: str, clients_own: bool = False) -> None:
        """Raises `GrammarError` that names `called` and `param`, or `OverloadedError` if no thread was free in time.
        `clients_own`: a client wrote the rules of the grammar. With such ones llguidance has run without an end, and a
        thread cannot be ended, so a process compiles them first."""
        if self._grammars.kept(grammar) is not None:
            return
        threads = self._heavy if clients_own or is_heavy(grammar) else self._light
        try:
            if threads is self._heavy and (why := self._refused.get(_digest(grammar))):
                raise GrammarError(why)
            compiling = threads.under_way.get(grammar) or self._start(grammar, threads)
            async with asyncio.timeout(threads.timeout_s):
                await asyncio.shield(compiling.future)
        except TimeoutError:
            if not compiling.begun:
                raise OverloadedError(TOO_MANY) from None
            compiling.refused = True
            words = f"compiling it takes more than {threads.timeout_s:g} s"
            raise GrammarError(f"Invalid {called}: {words}.", param=param) from None
        except GrammarError as error:
            raise GrammarError(f"Invalid {called}: {error.message}.", param=param) from error

    def _start(self, grammar: Grammar, threads: "CompileThreads") -> "NewGrammar":
        if len(threads.under_way) >= threads.most:
            raise OverloadedError(TOO_MANY)

        def compile_it() -> None:
            compiling.begun = True
            if threads is self._heavy:
                self._try_apart(grammar)
            self._grammars.get(grammar)

        def ended(future: asyncio.Future[None]) -> None:
            del threads.under_way[grammar]
            if compiling.refused:
                self._grammars.forget(grammar)
            error = None if future.cancelled() else future.exception()  # it is seen, also if all who asked have left
            if threads is self._heavy and isinstance(error, GrammarError):
                self._refused[_digest(grammar)] = error.message
                if len(self._refused) > MAX_REFUSED:
                    self._refused.popitem(last=False)

        compiling = threads.under_way[grammar] = NewGrammar()
        compiling.future = asyncio.get_running_loop().run_in_executor(threads.pool, compile_it)
        compiling.future.add_done_callback(ended)
        return compiling


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(grammar)).digest()


class CompileThreads:
    """The threads for one kind of grammars, and the grammars that wait for them or are in them."""

    def __init__(self, num_threads: int, *, timeout_s: float, most: int) -> None:
        """`most`: that may be under way at a time."""
        self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix="motet-grammar")
        self.timeout_s = timeout_s
        self.most = most
        self.under_way: dict[Grammar, NewGrammar] = {}


@dataclass
class NewGrammar:
    """A grammar that waits for a thread or is in one."""

    future: asyncio.Future[None] = field(init=False)
    begun: bool = False
    """True once a thread has it."""
    refused: bool = False
    """True if a request was refused because it took too long."""
