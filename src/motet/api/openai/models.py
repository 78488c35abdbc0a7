"""The models that are served: `GET /v1/models` and `GET /v1/models/{id}`; and their tokenizers, in vLLM's shapes:
`/tokenize`, `/detokenize` and `GET /tokenizer_info`."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import ClassVar, Self, TypedDict

from fastapi import APIRouter, Request, Response
from pydantic import model_validator

from motet.api.generation.prompts import text_prompt
from motet.api.generation.request_fields import TokenIds
from motet.api.http.caller import caller_of
from motet.api.http.dialect import MODELS, speaks_anthropic
from motet.api.http.failure import FieldError, invalid_value
from motet.api.http.routes import json_response, new_router, post
from motet.api.http.schema import Neutral, Schema
from motet.api.openai.chat_plan import chat_prompt
from motet.api.openai.chat_schema import ChatPrompt
from motet.api.served import ServedModel, TextModel, model_named
from motet.api.service import Service
from motet.errors import NoWorkerError
from motet.text.tokenizer import Tokenizer


class ModelObject(TypedDict):
    """A model in OpenAI's shape, with fields that vLLM and Motet add."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str | None
    parent: str | None
    max_model_len: int | None
    weight_version: str | None
    default_sampling_params: dict[str, int | float] | None


class TokenizeBody(ChatPrompt):
    """A text (`prompt`), or a chat (`messages` and the fields of a chat prompt)."""

    neutral: ClassVar[Neutral] = {"media_io_kwargs": ({},), "mm_processor_kwargs": ({},)}

    model: str | None = None
    prompt: str | None = None
    """The text; for a text, None as `add_special_tokens` means True."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def check_one_of_two(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise FieldError(invalid_value, "prompt", "exactly one of it and 'messages' must be given")
        return self


class DetokenizeBody(Schema):
    has_token_ids = True

    model: str | None = None
    tokens: TokenIds


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

    @post(router, "/tokenize", body=TokenizeBody, summary="The tokens of a text or of a conversation")
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        served, caller = service.served(body.model), caller_of(request)
        if body.prompt is None:
            ids = await chat_prompt(served.preparer, body, caller=caller, config=service.config)
        else:
            special = body.add_special_tokens is not False
            ids = await text_prompt(
                served.preparer, body.prompt, add_special_tokens=special, param="prompt", caller=caller
            )
        tokenizer = served.tokenizer if body.return_token_strs else None
        respond = partial(_tokens, ids, max_model_len=served.info.max_model_len, named_by=tokenizer)
        return await caller.in_thread_if_long(respond, len(ids))

    @post(router, "/detokenize", body=DetokenizeBody, summary="The text of tokens")
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        served = service.served(body.model)
        served.preparer.check_length(body.tokens, param="tokens")
        respond = partial(_text, body.tokens, served.tokenizer, vocab_size=served.info.vocab_size)
        return await caller_of(request).in_thread_if_long(respond, len(body.tokens))

    @router.get("/tokenizer_info")
    async def tokenizer_info(model: str | None = None) -> Response:
        """Returns the facts about the tokenizer in vLLM's shape."""
        served = service.served(model)
        named = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token")) | served.tokenizer.named_tokens
        info = {"tokenizer_class": served.tokenizer.class_name, **named, "chat_template": served.template.source}
        return json_response(info | {"model_max_length": served.info.max_model_len})

    return router


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
    """Returns a model in OpenAI's shape. Its length depends on its current workers; None if it has none."""
    length, version, defaults = None, None, None
    if isinstance(model, TextModel):
        root, length = model.root, model.max_model_len
    else:
        root = model.source
        with suppress(NoWorkerError):
            length, version = model.info.max_model_len, model.info.weight_version
            unknown = model.default_rules.unknown(model.info.default_sampling_params)
            defaults = model.default_sampling_params or (None if unknown else {})
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "motet",
        "root": root,
        "parent": model.parent,
        "max_model_len": length,
        "weight_version": version,
        "default_sampling_params": defaults,
    }


def _tokens(ids: Sequence[int], *, max_model_len: int, named_by: Tokenizer | None) -> Response:
    names = None if named_by is None else [named_by.token_name(token) for token in ids]
    return json_response({"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": names})


def _text(tokens: Sequence[int], tokenizer: Tokenizer, *, vocab_size: int) -> Response:
    if (unknown := max(tokens, default=0)) >= vocab_size:
        raise invalid_value("tokens", f"token id {unknown} is outside the model's vocabulary of {vocab_size}")
    return json_response({"prompt": tokenizer.decode(tokens, skip_special_tokens=False)})
