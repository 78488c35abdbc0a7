"""The models of a server, by the names that clients use: one on a server, several on a gateway.

ServedModel   a model whose engine takes token ids: Motet converts texts to tokens, and tokens to texts
TextModel     a model on a third-party server that takes texts: requests pass through
"""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import msgspec

from motet.api.http.long_work import WorkThread
from motet.engine import Engine
from motet.engine_info import EngineInfo, ModelCard
from motet.engines.upstream.text_source import TextGenerate
from motet.errors import GrammarError, ModelNotFoundError, NoWorkerError, OverloadedError, RequestError
from motet.grammar.compiled_grammar import Grammars
from motet.grammar.limits import is_heavy
from motet.grammar.trial import compile_in_process
from motet.ids import ModelName
from motet.sampling_defaults import DefaultRules
from motet.settings.server_config import ServerConfig
from motet.text.formats import ModelFormats
from motet.text.prepare import PromptPreparer
from motet.text.template import ChatTemplate
from motet.text.tokenizer import Tokenizer
from motet.types import Grammar

NUM_THREADS = 2
TIMEOUT_S = 5.0
HEAVY_TIMEOUT_S = 30.0
MAX_COMPILING = 32
"""Maximum number of new light grammars of one client that are compiled or wait for a thread at the same time."""
MAX_HEAVY_COMPILING = 8
"""The same for heavy grammars."""
MAX_CLIENTS = 8
"""Number of clients that can reach these numbers at the same time."""
MAX_REFUSED = 1024
"""Number of heavy grammars whose refusal is remembered."""
TOO_MANY = "Too many new grammars are being compiled; try again."


def now_s() -> int:
    return int(time.time())


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    name: str
    engine: Engine
    """Receives the groups. On a gateway it can have no worker at times."""
    placed: Engine | None = None
    """Receives the groups that a gateway has placed on this server and migrates itself; None if `engine` does."""
    tokenizer: Tokenizer
    template: ChatTemplate
    formats: ModelFormats
    """The formats of reasoning and tool calls in the answers."""
    root: str | None = None
    """Path or name that the model was loaded from, as its workers report it; None if the engine reports it."""
    parent: str | None = None
    """The name of the base model of an adapter; None for other models."""
    default_rules: DefaultRules = field(default=DefaultRules())
    """A gateway's settings for the defaults of sampling fields."""
    base: "ServedModel | None" = field(default=None, compare=False, repr=False)
    """The base model of an adapter, whose checks of grammars it shares; None for other models."""
    created: int = field(default_factory=now_s)

    @property
    def info(self) -> EngineInfo:
        """The facts about the engine, with the limits of its workers. Raises `NoWorkerError` if it never had any."""
        return self.engine.info

    @property
    def default_sampling_params(self) -> dict[str, int | float]:
        """Values of sampling fields that requests omit. Raises `NoWorkerError` if they are not known yet."""
        return self.default_rules.values(self.info.default_sampling_params)

    @property
    def source(self) -> str:
        """Path or name that the model was loaded from; the engine's name of the model if that is all that is known."""
        return self.root or self.info.root or self.info.model

    @property
    def preparer(self) -> PromptPreparer:
        """Makes prompts within the same limits. Must be read on the event loop, and can be used in any thread."""
        return PromptPreparer(self.tokenizer, self.template, info=self.info)

    @cached_property
    def grammars(self) -> "GrammarChecks":
        """The checks of grammars, made for the first request with a grammar."""
        if self.base is not None:
            return self.base.grammars
        size, eos = self.info.vocab_size, self.info.eos_token_ids
        grammars = Grammars(lambda: self.tokenizer, vocab_size=size, eos_token_ids=eos)
        compile_apart = partial(compile_in_process, tokenizer=self.tokenizer, vocab_size=size, eos_token_ids=eos)
        return GrammarChecks(grammars, try_apart=compile_apart)

    def max_group(self, config: ServerConfig) -> int:
        """Returns the maximum number of choices of one prompt."""
        return min(config.max_n, self.info.max_num_seqs)


@dataclass(frozen=True, kw_only=True)
class TextModel:
    name: str
    root: str
    created: int
    max_model_len: int | None
    """Maximum length as the server reported it; None if it did not."""
    generate: TextGenerate
    parent: str | None = None


EnginesOfAdapter = Callable[[ModelName], tuple[Engine, Engine]]
"""Returns the engine of an adapter, and the engine for its groups that a gateway has placed (`ServedModel.placed`)."""
Models = Callable[[], Mapping[str, ServedModel | TextModel]]
"""Returns the models of a server in the order in which they were added. On a gateway they change with its workers."""


class ModelWithAdapters:
    """The models of a server with engines of its own: the base model, and the adapters that its engines have loaded."""

    def __init__(
        self, base: ServedModel, *, cards: Callable[[], Mapping[ModelName, ModelCard]], engines_of: EnginesOfAdapter
    ) -> None:
        """`cards`: returns the models of the engines, the same object until they change."""
        self._base = base
        self._cards = cards
        self._engines_of = engines_of
        self._known: Mapping[ModelName, ModelCard] | None = None
        self._models: dict[str, ServedModel | TextModel] = {base.name: base}

    def __call__(self) -> Mapping[str, ServedModel | TextModel]:
        known = self._cards()
        if known is not self._known:
            adapters = [self._adapter(card) for card in known.values() if card.parent is not None]
            self._models = {model.name: model for model in (self._base, *adapters)}
            self._known = known
        return self._models

    def _adapter(self, card: ModelCard) -> ServedModel:
        """Returns the model of an adapter. An adapter that was replaced keeps its engine and the time of its start."""
        base, previous = self._base, self._models.get(card.name)
        root = card.root or card.name
        if isinstance(previous, ServedModel) and previous.root == root:
            return previous
        engine, placed = self._engines_of(card.name)
        model = replace(base, name=card.name, engine=engine, placed=placed, root=root, parent=base.name, base=base)
        return replace(model, created=now_s() if previous is None else previous.created)


def one_model(
    name: str,
    engine: Engine,
    *,
    tokenizer: Tokenizer,
    formats: ModelFormats | None = None,
    placed: Engine | None = None,
) -> Models:
    """Returns the models of a server that always has one model. `formats`: None to recognise them by the template."""
    model = served_model(name, engine, tokenizer=tokenizer, formats=formats, placed=placed)
    return lambda: {name: model}


def served_model(
    name: str,
    engine: Engine,
    *,
    tokenizer: Tokenizer,
    formats: ModelFormats | None = None,
    placed: Engine | None = None,
) -> ServedModel:
    """Returns a model. `formats`: None to recognise them by the template."""
    template = ChatTemplate.of(tokenizer)
    formats = formats or ModelFormats.of(tokenizer, template.source)
    return ServedModel(name=name, engine=engine, placed=placed, tokenizer=tokenizer, template=template, formats=formats)


def model_named(models: Mapping[str, ServedModel | TextModel], name: str | None) -> ServedModel | TextModel:
    """Returns the model that a request names. A request can omit `model` if there is only one, or one with its
    adapters: then it is for the base model. Raises `ModelNotFoundError` for an unknown name, `RequestError` if the name
    is missing and there are several, and `NoWorkerError` if there is no model."""
    if name is not None and (found := models.get(name) or _of_base(models, name)) is not None:
        return found
    known = list(models.values())
    if not known:
        raise NoWorkerError("No model is served at this moment: no worker has reported one yet.")
    listed = f"Available here: {', '.join(f'`{model.name}`' for model in known)}."
    if name is not None:
        message = f"The model `{name}` does not exist or you do not have access to it. {listed}"
        raise ModelNotFoundError(message, param="model")
    only = next((model for model in known if model.parent is None), known[0])
    if any(model is not only and model.parent != only.name for model in known):
        message = f"Missing required parameter: 'model'. This server has several. {listed}"
        raise RequestError(message, param="model", code="missing_required_parameter")
    return only


def _of_base(models: Mapping[str, ServedModel | TextModel], name: str) -> ServedModel | TextModel | None:
    """Returns the adapter that is named as `base:adapter`, as in Ray Serve LLM."""
    base, _, adapter = name.rpartition(":")
    found = models.get(adapter) if base else None
    return found if found is not None and found.parent == base else None


class GrammarChecks:
    """Compiles grammars before their groups are admitted, so that the client learns at once what is wrong with one.

        grammar ── known? ──► continue
            ├─ light ──► one of a few threads ──► continue, or 400
            └─ heavy ──► the thread for heavy grammars: first a process compiles it (`trial`), then the thread

    Compiling in a thread cannot be interrupted. If it takes too long, the grammar is refused, and the thread continues
    to its end, which limits bound. Requests with the same grammar wait for the same thread. Its result is dropped.

    Clients take turns: a grammar waits for at most one grammar of each other client."""

    def __init__(
        self,
        grammars: Grammars,
        *,
        try_apart: Callable[[Grammar], None],
        timeout_s: float = TIMEOUT_S,
        heavy_timeout_s: float = HEAVY_TIMEOUT_S,
    ) -> None:
        """`try_apart`: compiles a heavy grammar in another process, and raises its error."""
        self._grammars = grammars
        self._try_apart = try_apart
        self._light = CompileThreads(NUM_THREADS, timeout_s=timeout_s, max_compiling=MAX_COMPILING)
        self._heavy = CompileThreads(1, timeout_s=heavy_timeout_s, max_compiling=MAX_HEAVY_COMPILING)
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        """Errors of heavy grammars by their digests, so that they are not compiled again."""

    async def check(
        self, grammar: Grammar, *, called: str, param: str, clients_own: bool = False, client: str = ""
    ) -> None:
        """Raises `GrammarError` that names `called` and `param`, or `OverloadedError` if no thread was free in time.
        `clients_own`: True if the client sent the rules of the grammar. Some such grammars made llguidance run without
        an end, and a thread cannot be ended, so a process compiles them first. `client`: the client in whose
        turn the grammar is compiled."""
        if self._grammars.cached(grammar) is not None:
            return
        threads = self._heavy if clients_own or is_heavy(grammar) else self._light
        try:
            if threads is self._heavy and (why := self._refused.get(_digest(grammar))):
                raise GrammarError(why)
            compiling = threads.compiling.get(grammar) or self._start(grammar, threads, client=client)
            async with asyncio.timeout(threads.timeout_s):
                await asyncio.wait([compiling.future])  # which a timeout or a cancelled request does not cancel
            compiling.future.result()
        except TimeoutError:
            if not compiling.started:
                raise OverloadedError(TOO_MANY) from None
            compiling.refused = True
            why = f"compiling it takes more than {threads.timeout_s:g} s"
            raise GrammarError(f"Invalid {called}: {why}.", param=param) from None
        except GrammarError as error:
            raise GrammarError(f"Invalid {called}: {error.message}.", param=param) from error

    def _start(self, grammar: Grammar, threads: "CompileThreads", *, client: str) -> "NewGrammar":
        threads.check_number(client)
        compiling = threads.compiling[grammar] = NewGrammar(client, threads.next_turns())

        def compile_it() -> None:
            compiling.started = True
            if threads is self._heavy:
                self._try_apart(grammar)
            self._grammars.get(grammar)

        def ended(future: asyncio.Future[None]) -> None:
            del threads.compiling[grammar]
            if compiling.refused:
                self._grammars.evict(grammar)
            error = None if future.cancelled() else future.exception()  # else asyncio logs it if no request waits
            if threads is self._heavy and isinstance(error, GrammarError):
                self._refused[_digest(grammar)] = error.message
                if len(self._refused) > MAX_REFUSED:
                    self._refused.popitem(last=False)

        async def compile_in_turn() -> None:
            async with compiling.turns.turn(client):
                await asyncio.get_running_loop().run_in_executor(threads.pool, compile_it)

        compiling.future = asyncio.ensure_future(compile_in_turn())
        compiling.future.add_done_callback(ended)
        return compiling


def _digest(grammar: Grammar) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(grammar)).digest()


class CompileThreads:
    """The threads for one kind of grammars, and the grammars that they compile or that wait for them."""

    def __init__(self, num_threads: int, *, timeout_s: float, max_compiling: int) -> None:
        """`max_compiling`: maximum number of grammars of one client that are compiled or wait at the same time."""
        self.timeout_s = timeout_s
        self.pool = ThreadPoolExecutor(num_threads, thread_name_prefix="motet-grammar")
        self.compiling: dict[Grammar, NewGrammar] = {}
        self._max_compiling = max_compiling
        self._turns = [WorkThread() for _ in range(num_threads)]

    def check_number(self, client: str) -> None:
        """Raises `OverloadedError` if the client, or all clients together, have too many grammars here."""
        own = sum(one.client == client for one in self.compiling.values())
        if own >= self._max_compiling or len(self.compiling) >= MAX_CLIENTS * self._max_compiling:
            raise OverloadedError(TOO_MANY)

    def next_turns(self) -> WorkThread:
        """Returns the turns with the fewest grammars."""
        return min(self._turns, key=lambda turns: sum(one.turns is turns for one in self.compiling.values()))


@dataclass
class NewGrammar:
    """A grammar that a thread compiles or that waits for a thread."""

    client: str
    turns: WorkThread
    future: asyncio.Future[None] = field(init=False)
    started: bool = False
    """True once a thread compiles the grammar."""
    refused: bool = False
    """True if a request was refused because compiling took too long."""
