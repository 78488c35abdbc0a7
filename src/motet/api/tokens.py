"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes."""

import msgspec
from fastapi import APIRouter, Response

from motet.api.json_body import json_response
from motet.api.prompts import chat_prompt, text_prompt
from motet.api.schema_tokenize import DetokenizeBody, TokenizeBody
from motet.api.service import Service
from motet.errors import RequestError


class Tokenized(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


def token_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Response:
        served = service.served(body.model)
        if body.prompt is None:
            ids = await chat_prompt(served.preparer, body)
        else:
            special = body.add_special_tokens is not False
            ids = await text_prompt(served.preparer, body.prompt, add_special_tokens=special, param="prompt")
        names = [served.tokenizer.token_name(token) for token in ids] if body.return_token_strs else None
        return json_response(Tokenized(len(ids), served.info.max_model_len, ids, names))

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Response:
        served = service.served(body.model)
        vocab_size = served.info.vocab_size
        if unknown := next((token for token in body.tokens if token >= vocab_size), None):
            raise RequestError(
                f"Invalid 'tokens': token id {unknown} is outside the model's vocabulary of {vocab_size}.",
                param="tokens",
            )
        return json_response(Detokenized(served.tokenizer.decode(body.tokens, skip_special_tokens=False)))

    return router
