"""The models that a server answers for, by the names that clients use: one on a server, several on a gateway.

ServedModel   token ids reach its engine: text becomes tokens here, and tokens text
TextModel     other servers take its texts as they are; requests pass through
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from motet.api.structured import GrammarChecks
from motet.config import ServerConfig
from motet.engines.base import Engine
from motet.engines.upstream.base import TextSource
from motet.errors import ModelNotFoundError, NoWorkerError, RequestError
from motet.grammar.compiled import Grammars
from motet.text.formats import ModelFormats
from motet.text.prepare import Preparer
from motet.text.template import ChatTemplate
from motet.text.tokenizer import Tokenizer
from motet.types import EngineInfo


def now_s() -> int:
    return int(time.time())


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model that is asked in tokens."""

    name: str
    """As clients say it."""
    engine: Engine
    """Where its groups go; it may be that no worker is up just now."""
    tokenizer: Tokenizer
    template: ChatTemplate
    formats: ModelFormats
    """How its answers mark thoughts and calls of tools."""
    root: str | None = None
    """Where it comes from; None: as its engine calls it."""
    parent: str | None = None
    """Of an adapter: the name of what it adapts."""
    created: int = field(default_factory=now_s)

    @property
    def info(self) -> EngineInfo:
        """With the limits of the workers there are now. Raises `NoWorkerError` if there has never been one."""
        return self.engine.info

    @property
    def preparer(self) -> Preparer:
        """With the same limits; asked on the event loop, used anywhere."""
        return Preparer(self.tokenizer, self.template, self.info)

    @cached_property
    def grammars(self) -> GrammarChecks:
        """Made when the first request has a grammar."""
        info = self.info
        return GrammarChecks.of(
            Grammars(lambda: self.tokenizer, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids)
        )

    def max_group(self, config: ServerConfig) -> int:
        """Choices one prompt may have."""
        return min(config.max_n, self.info.max_num_seqs)


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A model that is asked in texts, elsewhere."""

    name: str
    root: str
    created: int
    max_model_len: int | None
    """None: not told."""
    source: TextSource


class Models(Protocol):
    """Asked at each request: on a gateway models come and go with their workers."""

    def all(self) -> Sequence[ServedModel | TextModel]:
        """In the order in which they came."""
        ...

    def get(self, name: str) -> ServedModel | TextModel | None: ...


class OneModel:
    """`Models` of a server that has one, from the start to the end."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    @classmethod
    def of(
        cls,
        name: str,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        formats: ModelFormats | None = None,
    ) -> "OneModel":
        """`template`: None for the tokenizer's own. `formats`: None for those that the template is known by."""
        template = template or ChatTemplate.of(tokenizer)
        formats = formats or ModelFormats.of(tokenizer, template.source)
        return cls(ServedModel(name=name, engine=engine, tokenizer=tokenizer, template=template, formats=formats))

    def all(self) -> Sequence[ServedModel]:
        return (self._model,)

    def get(self, name: str) -> ServedModel | None:
        return self._model if name == self._model.name else None


def model_named(models: Models, name: str | None) -> ServedModel | TextModel:
    """What a request means by its `model`, which it may leave out where there is only one.

    Raises `ModelNotFoundError` for a name that nobody has, `RequestError` for none among several, and `NoWorkerError`
    while there is no model at all."""
    found = None if name is None else models.get(name)
    if found is not None:
        return found
    known = models.all()
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
