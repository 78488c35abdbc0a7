"""Two models of one service. They differ in everything that a request could confuse: vocabulary, lengths, counts and
templates.

plain     "hello" is one token                 4096 tokens   512 ids   an answer in its own words
turned    a is b and b is a; "hello" is five     64 tokens   300 ids   at most 3 choices
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from motet.api.served import ServedModel, TextModel
from motet.engine import Engine
from motet.ids import ModelName
from motet.text.formats import ModelFormats
from motet.text.template import ChatTemplate
from motet.text.tokenizer import Tokenizer
from motet.types import Role
from tests.api.serving import Served, WatchedEngine, saying
from tests.tiny_tokenizer import save_tiny_tokenizer

Tokenizers = tuple[Tokenizer, Tokenizer]

PLAIN, TURNED = "plain", "org/turned"
TURNED_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


BODIES: Mapping[str, Mapping[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "aab"}]},
    "/v1/completions": {"prompt": "aab"},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {}},
    "/v1/responses": {"input": "aab"},
    "/tokenize": {"prompt": "aab"},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/score": {"prompt": "aab", "continuations": ["b"]},
    "/v1/decisions": {"input": "aab", "questions": [{"type": "predicate", "instructions": "a?"}]},
}
LONG = "/v1/decisions"
"""A route whose prompts are too long for the second model."""
every_route = pytest.mark.parametrize("path", [path for path in BODIES if path != LONG])
generating_routes = pytest.mark.parametrize("path", list(BODIES)[:4])
ticket_routes = pytest.mark.parametrize("path", list(BODIES)[:3])


def turned_tokenizer(folder: Path) -> Tokenizer:
    """Returns the tiny tokenizer without its merges, and with the ids of a and b exchanged."""
    save_tiny_tokenizer(folder, chat_template=TURNED_TEMPLATE)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    content["model"]["merges"] = []
    path.write_text(json.dumps(content))
    return Tokenizer.load(folder)


def served_as(name: str, engine: Engine, tokenizer: Tokenizer, **fields: Any) -> ServedModel:
    return ServedModel(
        name=name,
        engine=engine,
        tokenizer=tokenizer,
        template=ChatTemplate.of(tokenizer),
        formats=ModelFormats(tokenizer=tokenizer),
        **fields,
    )


class ListedModels:
    """`Models` that a test can change while the server runs."""

    def __init__(self, *listed: ServedModel | TextModel) -> None:
        self.listed = list(listed)

    def __call__(self) -> Mapping[str, ServedModel | TextModel]:
        return {model.name: model for model in self.listed}


class TwoModels(ListedModels):
    """The two models, each with its own engine."""

    def __init__(
        self,
        tokenizers: Tokenizers,
        *,
        roles: tuple[Role, Role] = (Role.BOTH, Role.BOTH),
        gated: bool = False,
    ) -> None:
        self.engines = tuple(WatchedEngine(saying("ab"), role=role, gated=gated) for role in roles)
        self.plain, self.turned = self.engines
        self.plain.info = replace(self.plain.info, model=ModelName("weights/plain"), fingerprint="plain-same")
        self.turned.info = replace(
            self.turned.info,
            model=ModelName("weights/turned"),
            fingerprint="turned-same",
            max_model_len=64,
            vocab_size=300,
            max_num_seqs=3,
        )
        names = zip((PLAIN, TURNED), self.engines, tokenizers, strict=True)
        super().__init__(*(served_as(name, engine, tokenizer) for name, engine, tokenizer in names))


async def post(served: Served, path: str, model: str | None, **fields: object) -> httpx.Response:
    return await served.http.post(path, json={**BODIES[path], **fields, **({} if model is None else {"model": model})})
