"""The models of a gateway: those that its workers have, each with its tokenizer, while any worker has it.

A model is known from when its first worker was met until its last one has left: while all are away it is answered 503
and not 404.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from motet.api.served import ServedModel, TextModel, now_s
from motet.deploy.compose import Router
from motet.deploy.discover import FoundServer
from motet.deploy.tokenizers import Loaded, Tokenizers
from motet.engines.upstream.base import UNKNOWN_LENGTH
from motet.engines.wire import EngineReport
from motet.ids import ModelName
from motet.routing.of_model import OfModel
from motet.routing.text_routed import TextRouted
from motet.types import EngineKind, ModelCard


class GatewayModels:
    """`motet.api.served.Models`. `texts`: who answers for models that only text upstreams have."""

    def __init__(self, router: Router, tokenizers: Tokenizers, texts: TextRouted, *, first_name: str = "") -> None:
        """`first_name`: what clients call the first model, in place of its workers' name for it."""
        self._router = router
        self._tokenizers = tokenizers
        self.texts = texts
        self._first_name = first_name
        self._first: str | None = None
        self._known: Mapping[ModelName, ModelCard] = {}
        """What the models below were made of."""
        self._made: dict[ModelName, ServedModel | TextModel] = {}
        """By the names of workers."""
        self._models: dict[str, ServedModel | TextModel] = {}
        """By the names of clients."""

    async def learn(self, report: EngineReport, server: FoundServer) -> None:
        """All that a worker takes before it can be used. Raises EngineError if that is not to be had."""
        model = report.info.model
        if report.info.kind is not EngineKind.OPENAI:
            loaded = await self._tokenizers.learn(model, server.tokenizer, worker=server.url)
            await server.check(loaded.tokenizer, model)
        if self._first is None:
            self._first = model

    def all(self) -> Sequence[ServedModel | TextModel]:
        return list(self._now().values())

    def get(self, name: str) -> ServedModel | TextModel | None:
        return self._now().get(name)

    def _now(self) -> dict[str, ServedModel | TextModel]:
        """Looked at anew when a worker has come, gone, or changed what it serves."""
        known = self._router.fleet.models()
        if known is not self._known:
            made = {card.name: self._model(card, self._made.get(card.name)) for card in known.values()}
            self._made = {name: model for name, model in made.items() if model is not None}
            self._models = {model.name: model for model in self._made.values()}
            self._known = known
        return self._models

    def tokenizer_files(self) -> dict[str, bytes]:
        """Of the first model that has a tokenizer: of the only one, where anybody asks."""
        first = self._tokenizers.first()
        return {} if first is None else first.files

    def _model(self, card: ModelCard, former: ServedModel | TextModel | None) -> ServedModel | TextModel | None:
        """None: its tokenizer is not known yet, so no worker with it has been used. `former` itself if nothing of it
        has changed: it keeps the grammars that were compiled for it."""
        text = self._router.fleet.only_text(card.name)
        model = self._text_model(card) if text else self._token_model(card, former)
        if former is None or model is None:
            return model
        model = replace(model, created=former.created)
        return former if model == former else model

    def _text_model(self, card: ModelCard) -> TextModel:
        return TextModel(
            name=self._shown(card.name),
            root=card.root or card.name,
            created=now_s(),
            max_model_len=None if card.max_model_len == UNKNOWN_LENGTH else card.max_model_len,
            source=self.texts.of(card.name),
        )

    def _token_model(self, card: ModelCard, former: ServedModel | TextModel | None) -> ServedModel | None:
        loaded = self._loaded(card.name)
        if loaded is None:
            return None
        router = self._router
        return ServedModel(
            name=self._shown(card.name),
            engine=former.engine
            if isinstance(former, ServedModel)
            else OfModel(router.engine, router.fleet, card.name),
            tokenizer=loaded.tokenizer,
            template=loaded.template,
            formats=loaded.formats,
            root=card.root or card.name,
            parent=None if card.parent is None else self._shown(card.parent),
        )

    def _loaded(self, name: str) -> Loaded | None:
        """The tokenizer of a model is that of its worker's own one, of which it is an adapter or another name."""
        base = self._router.fleet.base_of(name)
        return None if base is None else self._tokenizers.get(base)

    def _shown(self, name: str) -> str:
        return self._first_name if self._first_name and name == self._first else name
