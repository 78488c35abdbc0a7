"""What is served: `GET /v1/models`, `GET /v1/models/{id}`, and the tokenizers: `/tokenize`, `/detokenize`,
`GET /tokenizer_info`."""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TypedDict

from fastapi import APIRouter, Request, Response

from motet.api.generation.answer import json_response
from motet.api.generation.plan import beside_the_loop, chat_prompt, text_prompt
from motet.api.http.caller import PostRoute, new_router, with_body
from motet.api.http.dialect import MODELS, speaks_anthropic
from motet.api.http.failure import invalid_value
from motet.api.openai.completions_schema import DetokenizeBody, TokenizeBody
from motet.api.served import ServedModel, TextModel, model_named
from motet.api.service import Service
from motet.errors import NoWorkerError
from motet.text.tokenizer import Tokenizer

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
"""`/tokenizer_info` has them also if the tokenizer lacks them, as null."""


class ModelObject(TypedDict):
    """A model in OpenAI's shape, with what vLLM and we add to it."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str | None
    parent: str | None
    max_model_len: int | None
    weight_version: str | None


def models_router(service: Service) -> APIRouter:
    router = new_router()

    @router.get(MODELS)
    async def list_models(request: Request) -> Response:
        cards = [_card(model) for model in service.models().values()]
        if not speaks_anthropic(request.scope):
            return json_response({"object": "list", "data": cards})
        first, last = (cards[0]["id"], cards[-1]["id"]) if cards else (None, None)
        page = {"has_more": False, "first_id": first, "last_id": last}
        return json_response({"data": [*map(_as_anthropic, cards)], **page})

    @router.get(MODELS + "/{model:path}")
    async def get_model(model: str, request: Request) -> Response:
        card = _card(model_named(service.models(), model))
        return json_response(_as_anthropic(card) if speaks_anthropic(request.scope) else card)

    async def tokenize(body: TokenizeBody, _: Request) -> Response:
        served = service.served(body.model)
        if body.prompt is None:
            ids = await chat_prompt(served.preparer, body)
        else:
            special = body.add_special_tokens is not False
            ids = await text_prompt(served.preparer, body.prompt, add_special_tokens=special, param="prompt")
        tokenizer = served.tokenizer if body.return_token_strs else None
        told = partial(_tokens, ids, max_model_len=served.info.max_model_len, named_by=tokenizer)
        return await beside_the_loop(told, len(ids))

    async def detokenize(body: DetokenizeBody, _: Request) -> Response:
        served = service.served(body.model)
        served.preparer.check_length(body.tokens, param="tokens")
        told = partial(_text, body.tokens, served.tokenizer, vocab_size=served.info.vocab_size)
        return await beside_the_loop(told, len(body.tokens))

    @router.get("/tokenizer_info")
    async def tokenizer_info(model: str | None = None) -> Response:
        """Answers in vLLM's shape."""
        served = service.served(model)
        named = dict.fromkeys(NAMED_TOKENS) | served.tokenizer.named_tokens
        told = {"tokenizer_class": served.tokenizer.class_name, **named, "chat_template": served.template.source}
        return json_response(told | {"model_max_length": served.info.max_model_len})

    for path, handle, body, summary in (
        ("/tokenize", with_body(TokenizeBody, tokenize), TokenizeBody, "The tokens of a text or of a conversation"),
        ("/detokenize", with_body(DetokenizeBody, detokenize), DetokenizeBody, "The text of tokens"),
    ):
        router.routes.append(PostRoute(path, handle, body=body, summary=summary))
    return router


def _tokens(ids: Sequence[int], *, max_model_len: int, named_by: Tokenizer | None) -> Response:
    names = None if named_by is None else [named_by.token_name(token) for token in ids]
    return json_response({"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": names})


def _text(tokens: Sequence[int], tokenizer: Tokenizer, *, vocab_size: int) -> Response:
    if (unknown := max(tokens, default=0)) >= vocab_size:
        raise invalid_value("tokens", f"token id {unknown} is outside the model's vocabulary of {vocab_size}")
    return json_response({"prompt": tokenizer.decode(tokens, skip_special_tokens=False)})


def _as_anthropic(card: ModelObject) -> dict[str, object]:
    """Returns a model in the shape of Anthropic's API. The prompt and the answer share the model's length."""
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(card["created"], UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }


def _card(model: ServedModel | TextModel) -> ModelObject:
    """The engine is asked for the length each time, since workers come and go. None: nobody knows it now."""
    root, version = model.root, None
    if isinstance(model, TextModel):
        length = model.max_model_len
    else:
        root = model.info.model if root is None else root
        try:
            length, version = model.info.max_model_len, model.info.weight_version
        except NoWorkerError:
            length = None
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "motet",
        "root": root,
        "parent": model.parent,
        "max_model_len": length,
        "weight_version": version,
    }
