"""The tokenizers of the models that a gateway serves: each found once, before the first worker with it gets a group.

--tokenizer-of MODEL=FOLDER     for this model
--tokenizer FOLDER              for every model without one of its own
neither                         what the worker hands out, or says it was loaded from
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from motet.deploy.tokenizer_files import load_files, read_files
from motet.errors import EngineError, MotetError
from motet.text.formats import ModelFormats, ParserNames
from motet.text.template import ChatTemplate
from motet.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

PATIENCE_S = 120.0
"""How long a tokenizer may take to come, from a hub say."""
TRY_AGAIN_S = 30.0
"""Whoever could not hand out a model's tokenizer is not asked again before."""

HandOut = Callable[[], Awaitable[dict[str, bytes]]]
"""The files of a worker's own tokenizer. Raises MotetError."""


@dataclass(frozen=True)
class Loaded:
    """A tokenizer, its chat template, how answers to it are read, and what it was made of."""

    tokenizer: Tokenizer
    template: ChatTemplate
    formats: ModelFormats
    files: dict[str, bytes]


@dataclass(frozen=True)
class TokenizerRules:
    """Where tokenizers come from, as far as it was said."""

    of_model: Mapping[str, Path]
    others: Path | None = None
    """For models that are not named."""
    chat_template: str | None = None
    """Jinja text in place of the models' own."""
    parsers: ParserNames = field(default=ParserNames())
    """How their answers are read."""


@dataclass(frozen=True)
class _Failure:
    error: EngineError
    again_s: float
    """When it may be tried again."""


class Tokenizers:
    """By the name that workers have for a model."""

    def __init__(self, rules: TokenizerRules, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rules = rules
        self._clock = clock
        self._loaded: dict[str, Loaded] = {}
        self._failures: dict[tuple[str, str], _Failure] = {}
        """By model and worker: another one may have it, or say better where it is."""
        self._locks: dict[str, asyncio.Lock] = {}

    def get(self, model: str) -> Loaded | None:
        return self._loaded.get(model)

    def first(self) -> Loaded | None:
        """Of the model that came first."""
        return next(iter(self._loaded.values()), None)

    async def learn(self, model: str, hand_out: HandOut, *, worker: str) -> Loaded:
        """`worker`: who hands it out. Raises EngineError if it is not to be had."""
        async with self._locks.setdefault(model, asyncio.Lock()):
            if loaded := self._loaded.get(model):
                return loaded
            failure = self._failures.get((model, worker))
            if failure is not None and self._clock() < failure.again_s:
                raise failure.error
            try:
                async with asyncio.timeout(PATIENCE_S):
                    loaded = await self._load(model, hand_out)
            except (MotetError, TimeoutError) as error:
                why = error.message if isinstance(error, MotetError) else f"it did not come within {PATIENCE_S:g} s"
                told = EngineError(f"no tokenizer for {model} (give --tokenizer-of {model}=FOLDER): {why}")
                self._failures[model, worker] = _Failure(told, self._clock() + TRY_AGAIN_S)
                raise told from error
            self._loaded[model] = loaded
            self._failures = {key: failure for key, failure in self._failures.items() if key[0] != model}
            return loaded

    async def _load(self, model: str, hand_out: HandOut) -> Loaded:
        folder = self._rules.of_model.get(model, self._rules.others)
        files = await hand_out() if folder is None else await asyncio.to_thread(read_files, folder)
        tokenizer = await asyncio.to_thread(load_files, files, chat_template=self._rules.chat_template)
        template = ChatTemplate.of(tokenizer)
        formats = ModelFormats.of(tokenizer, template.source, self._rules.parsers)
        return Loaded(tokenizer, template, formats, files)
