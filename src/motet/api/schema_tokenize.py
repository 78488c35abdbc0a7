"""The bodies of `POST /tokenize` (text or a chat) and `POST /detokenize`, in vLLM's shapes."""

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import model_validator

from motet.api.schema_chat import ChatPrompt
from motet.api.schema_shared import Schema, TokenId
from motet.errors import RequestError


class TokenizeBody(ChatPrompt):
    """A text (`prompt`) or a chat (`messages` and the fields of a chat prompt), one of the two."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "chat_template": (),
        "mm_processor_kwargs": ({},),
    }

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """None: yes for a text; the template of a chat writes its own."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def check_one_of_two(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise RequestError("Exactly one of 'prompt' and 'messages' must be given.", param="prompt")
        if self.messages and self.add_special_tokens:
            raise RequestError(
                "'add_special_tokens' is for a 'prompt': the chat template writes the special tokens of 'messages'.",
                param="add_special_tokens",
            )
        return self


class DetokenizeBody(Schema):
    model: str | None = None
    tokens: list[TokenId]
