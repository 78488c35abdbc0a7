"""What is served: `GET /v1/models`, `GET /v1/models/{id}`, and the tokenizers behind `/tokenize`, `/detokenize`."""

from functools import partial

from anyio import to_thread
from fastapi import APIRouter, Request, Response

from motet.api.answer import json_response
from motet.api.caller import PostRoute, new_router, with_body
from motet.api.failure import invalid_value
from motet.api.plan import LONG_TEXT, chat_prompt, text_prompt
from motet.api.schemas.completions import DetokenizeBody, TokenizeBody
from motet.api.served import ServedModel, TextModel, model_named
from motet.api.service import Service
from motet.errors import NoWorkerError


def models_router(service: Service) -> APIRouter:
    router = new_router()

    @router.get("/v1/models")
    async def list_models() -> Response:
        return json_response({"object": "list", "data": [_card(model) for model in service.models().values()]})

    @router.get("/v1/models/{model:path}")
    async def get_model(model: str) -> Response:
        return json_response(_card(model_named(service.models(), model)))

    async def tokenize(body: TokenizeBody, _: Request) -> Response:
        served = service.served(body.model)
        if body.prompt is None:
            ids = await chat_prompt(served.preparer, body)
        else:
            special = body.add_special_tokens is not False
            ids = await text_prompt(served.preparer, body.prompt, add_special_tokens=special, param="prompt")
        names = [served.tokenizer.token_name(token) for token in ids] if body.return_token_strs else None
        count, max_model_len = len(ids), served.info.max_model_len
        return json_response({"count": count, "max_model_len": max_model_len, "tokens": ids, "token_strs": names})

    async def detokenize(body: DetokenizeBody, _: Request) -> Response:
        served = service.served(body.model)
        served.preparer.check_length(body.tokens, param="tokens")
        vocab_size = served.info.vocab_size
        if unknown := next((token for token in body.tokens if token >= vocab_size), None):
            raise invalid_value("tokens", f"token id {unknown} is outside the model's vocabulary of {vocab_size}")
        decode = partial(served.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return json_response({"prompt": decode() if len(body.tokens) < LONG_TEXT else await to_thread.run_sync(decode)})

    router.routes.append(PostRoute("/tokenize", with_body(TokenizeBody, tokenize), methods=["POST"]))
    router.routes.append(PostRoute("/detokenize", with_body(DetokenizeBody, detokenize), methods=["POST"]))
    return router


def _card(model: ServedModel | TextModel) -> dict[str, object]:
    """The engine is asked for the length each time, since workers come and go. None: nobody knows it now."""
    root = model.root
    if isinstance(model, TextModel):
        length = model.max_model_len
    else:
        root = model.info.model if root is None else root
        try:
            length = model.info.max_model_len
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
    }
