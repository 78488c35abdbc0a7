"""The models of a gateway: the models of its workers, each with its tokenizer.

A model is known from its first worker until its last one has left; while all its workers are unavailable, requests for
it get 503 and not 404. Its tokenizer is loaded once, before the first worker with the model gets a group:

    --tokenizer-of MODEL=FOLDER     for this model
    --tokenizer FOLDER              for every model without a folder of its own
    neither                         the files that the worker sends, or the model folder that it names
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from motet.api.served import ServedModel, TextModel, now_s
from motet.deploy.discover import SAMPLE, FoundServer, load_files, read_files
from motet.engine_info import UNKNOWN_VOCABULARY, EngineInfo, ModelCard
from motet.engines.refusals import QUOTED_CHARS
from motet.engines.upstream.text_source import UNKNOWN_LENGTH
from motet.engines.wire import EngineReport
from motet.errors import EngineError, MotetError
from motet.ids import ModelName
from motet.routing.router import Router
from motet.routing.text_router import TextRouter
from motet.sampling_defaults import DefaultRules
from motet.text.formats import ModelFormats, ParserNames
from motet.text.template import ChatTemplate
from motet.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 120.0
"""Maximum time to fetch a tokenizer, for example from a hub."""
RETRY_S = 30.0
"""Time before the next request to a worker that could not send a model's tokenizer."""

DEFAULT_RULES = DefaultRules()

FetchFiles = Callable[[], Awaitable[dict[str, bytes]]]
"""Fetches the files of a worker's tokenizer. Raises MotetError."""


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer, its chat template, the formats of answers, and the files from which it was made."""

    tokenizer: Tokenizer
    template: ChatTemplate
    formats: ModelFormats
    files: dict[str, bytes]


@dataclass(frozen=True)
class TokenizerRules:
    """The settings for where tokenizers come from."""

    of_model: Mapping[str, Path]
    others: Path | None = None
    """Folder for models without an entry of their own."""
    chat_template: str | None = None
    """Jinja template that replaces the models' own templates."""
    parsers: ParserNames = field(default=ParserNames())


class Tokenizers:
    """The tokenizers, by the name that workers have for the model."""

    def __init__(self, rules: TokenizerRules, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rules = rules
        self._clock = clock
        self._loaded: dict[str, LoadedTokenizer] = {}
        self._failures: dict[tuple[str, str], tuple[EngineError, float]] = {}
        """Failures by model and worker, each with the time from which the worker can be queried again."""
        self._locks: dict[str, asyncio.Lock] = {}

    def get(self, model: str) -> LoadedTokenizer | None:
        return self._loaded.get(model)

    def first_files(self) -> dict[str, bytes]:
        """Returns the files of the tokenizer that was loaded first; empty if there is none."""
        return next((loaded.files for loaded in self._loaded.values()), {})

    async def load(self, model: str, fetch: FetchFiles, *, worker: str) -> LoadedTokenizer:
        """Loads a model's tokenizer, with files from `worker` unless the settings name a folder. Raises EngineError."""
        async with self._locks.setdefault(model, asyncio.Lock()):
            if loaded := self._loaded.get(model):
                return loaded
            failure, retry_s = self._failures.get((model, worker), (None, 0.0))
            if failure is not None and self._clock() < retry_s:
                raise failure
            try:
                async with asyncio.timeout(FETCH_TIMEOUT_S):
                    loaded = await self._load(model, fetch)
            except (MotetError, TimeoutError) as error:
                reason = (
                    error.message if isinstance(error, MotetError) else f"not received within {FETCH_TIMEOUT_S:g} s"
                )
                failure = EngineError(f"no tokenizer for {model} (set --tokenizer-of {model}=FOLDER): {reason}")
                self._failures[model, worker] = failure, self._clock() + RETRY_S
                raise failure from error
            self._loaded[model] = loaded
            self._failures = {key: value for key, value in self._failures.items() if key[0] != model}
            return loaded

    async def _load(self, model: str, fetch: FetchFiles) -> LoadedTokenizer:
        folder = self._rules.of_model.get(model, self._rules.others)
        files = await fetch() if folder is None else await asyncio.to_thread(read_files, folder)
        return await asyncio.to_thread(self._make, files)

    def _make(self, files: dict[str, bytes]) -> LoadedTokenizer:
        """Makes a tokenizer. Raises MotetError for any invalid files, even if the Rust code of the library panics."""
        try:
            tokenizer = load_files(files, chat_template=self._rules.chat_template)
            template = ChatTemplate.of(tokenizer)
            formats = ModelFormats.of(tokenizer, template.source, names=self._rules.parsers)
            tokenizer.encode(SAMPLE)
        except (MotetError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise EngineError(
                f"its files cannot be used: {type(error).__name__}: {str(error)[:QUOTED_CHARS]}"
            ) from error
        return LoadedTokenizer(tokenizer, template, formats, files)


class GatewayModels:
    """The models for the API; a `motet.api.served.Models`."""

    def __init__(
        self,
        router: Router,
        tokenizers: Tokenizers,
        *,
        texts: TextRouter,
        first_name: str = "",
        defaults: DefaultRules = DEFAULT_RULES,
    ) -> None:
        """`texts`: routes requests for models of text upstreams; `first_name`: name of the first model for clients;
        `defaults`: the settings for the defaults of sampling fields."""
        self._defaults = defaults
        self._router = router
        self._tokenizers = tokenizers
        self._texts = texts
        self._first_name = first_name
        self._first: str | None = None
        self._vocabularies: dict[ModelName, int] = {}
        """Vocabulary sizes by model, which all workers with the model must have."""
        self._known: Mapping[ModelName, ModelCard] = {}
        """Models of the fleet from which `_models` was made."""
        self._models: dict[str, ServedModel | TextModel] = {}
        """Models by the names that clients use."""

    async def prepare(self, report: EngineReport, server: FoundServer) -> None:
        """Loads the tokenizer that is needed before a worker can be used. Raises EngineError if it is not available."""
        model = report.info.model
        probe, size = server.probe, report.info.vocab_size
        if probe.tokenizer is not None:
            loaded = await self._tokenizers.load(model, probe.tokenizer, worker=server.url)
            if size != UNKNOWN_VOCABULARY and (known := self._vocabularies.setdefault(model, size)) != size:
                raise EngineError(f"it has a vocabulary of {size}, and the tokenizer of {model} here is for {known}")
            if probe.check_tokenizer is not None:
                await probe.check_tokenizer(loaded.tokenizer, model)
        self._compare_defaults(report.info, server.url)
        if self._first is None:
            self._first = model

    def __call__(self) -> Mapping[str, ServedModel | TextModel]:
        """Returns the models. They are computed again when a worker has joined, left, or changed its models."""
        known = self._router.fleet.catalog.models()
        if known is not self._known:
            made: dict[str, ServedModel | TextModel] = {}
            for card in sorted(known.values(), key=lambda card: card.parent is not None):  # bases before adapters
                if (model := self._model(card, made)) is not None:
                    made[model.name] = model
            self._models = made
            self._known = known
        return self._models

    def _compare_defaults(self, info: EngineInfo, url: str) -> None:
        """Logs the defaults of sampling fields of a new model, and a warning if another worker has other defaults."""
        if self._defaults.unknown(info.default_sampling_params):
            return
        view = self._router.of(info.model)
        known = view.info.default_sampling_params if self._router.fleet.catalog.ready(info.model) else None
        if known is None:
            if values := self._defaults.values(info.default_sampling_params):
                logger.info("%s: default sampling parameters %s", info.model, values)
        elif known != info.default_sampling_params and self._defaults.replaced is None:
            shown = (info.model, url, info.default_sampling_params, known)
            logger.warning("%s: the worker at %s has the default sampling parameters %s; %s are used", *shown)

    def tokenizer_files(self) -> dict[str, bytes]:
        """Returns the files of the first tokenizer. Only gateways with one model send them to other servers."""
        return self._tokenizers.first_files()

    def _model(self, card: ModelCard, made: Mapping[str, ServedModel | TextModel]) -> ServedModel | TextModel | None:
        """Makes a model; None if its tokenizer is not loaded. Keeps an unchanged model, with its compiled grammars.
        `made`: the base models."""
        name, root = self._client_name(card.name), card.root or card.name
        parent = None if card.parent is None else self._client_name(card.parent)
        previous = self._models.get(name)
        model: ServedModel | TextModel
        if self._router.fleet.catalog.only_text(card.name):
            model = TextModel(
                name=name,
                root=root,
                created=now_s(),
                max_model_len=None if card.max_model_len == UNKNOWN_LENGTH else card.max_model_len,
                generate=self._texts.of(card.name),
                parent=parent,
            )
        else:
            # Adapters and aliases have the tokenizer of the worker's own model.
            base = self._router.fleet.catalog.base_of(card.name)
            loaded = None if base is None else self._tokenizers.get(base)
            if loaded is None:
                return None
            base_model = made.get(parent or "")
            router, kept = self._router, previous if isinstance(previous, ServedModel) else None
            model = ServedModel(
                name=name,
                engine=kept.engine if kept else router.of(card.name),
                placed=kept.placed if kept else router.placed(card.name),
                tokenizer=loaded.tokenizer,
                template=loaded.template,
                formats=loaded.formats,
                root=root,
                parent=parent,
                default_rules=self._defaults,
                base=base_model if isinstance(base_model, ServedModel) else None,
            )
        if previous is None:
            return model
        model = replace(model, created=previous.created)
        is_same = model == previous and getattr(model, "base", None) is getattr(previous, "base", None)
        return previous if is_same else model

    def _client_name(self, name: str) -> str:
        return self._first_name if self._first_name and name == self._first else name
