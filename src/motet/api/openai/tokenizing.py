"""The tokenizers of the models, in vLLM's shapes: `/tokenize`, `/detokenize`, `GET /tokenizer_info`."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, Self

from fastapi import APIRouter, Request, Response
from pydantic import model_validator

from motet.api.generation.prompts import in_thread_if_long, text_prompt
from motet.api.generation.sampling_fields import TokenIds
from motet.api.http.failure import FieldError, invalid_value
from motet.api.http.routes import PostRoute, json_response, new_router, with_body
from motet.api.http.schema import Schema
from motet.api.openai.chat_plan import chat_prompt
from motet.api.openai.chat_schema import ChatPrompt
from motet.api.service import Service
from motet.text.tokenizer import Tokenizer

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Tokens that `/tokenizer_info` always has; null if the tokenizer lacks them."""


class TokenizeBody(ChatPrompt):
    """A text (`prompt`), or a chat (`messages` and the fields of a chat prompt)."""

    refused = frozenset({"chat_template"})
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"mm_processor_kwargs": ({},)}

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
    model: str | None = None
    tokens: TokenIds


def tokenizer_router(service: Service) -> APIRouter:
    router = new_router()

    async def tokenize(body: TokenizeBody, _: Request) -> Response:
        served = service.served(body.model)
        if body.prompt is None:
            ids = await chat_prompt(served.preparer, body)
        else:
            special = body.add_special_tokens is not False
            ids = await text_prompt(served.preparer, body.prompt, add_special_tokens=special, param="prompt")
        tokenizer = served.tokenizer if body.return_token_strs else None
        respond = partial(_tokens, ids, max_model_len=served.info.max_model_len, named_by=tokenizer)
        return await in_thread_if_long(respond, len(ids))

    async def detokenize(body: DetokenizeBody, _: Request) -> Response:
        served = service.served(body.model)
        served.preparer.check_length(body.tokens, param="tokens")
        respond = partial(_text, body.tokens, served.tokenizer, vocab_size=served.info.vocab_size)
        return await in_thread_if_long(respond, len(body.tokens))

    @router.get("/tokenizer_info")
    async def tokenizer_info(model: str | None = None) -> Response:
        """Returns the facts about the tokenizer in vLLM's shape."""
        served = service.served(model)
        named = dict.fromkeys(NAMED_TOKENS) | served.tokenizer.named_tokens
        info = {"tokenizer_class": served.tokenizer.class_name, **named, "chat_template": served.template.source}
        return json_response(info | {"model_max_length": served.info.max_model_len})

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
