"""The body of `POST /v1/completions`."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import Field, PlainValidator, model_validator

from motet.api.schema_shared import IGNORED_FIELDS, GeneratingFields
from motet.api.schema_structured import FormattedFields
from motet.errors import RequestError

DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 5

Prompt = str | tuple[int, ...]
"""Text to be tokenised, or token ids."""


def parse_prompts(value: object) -> tuple[Prompt, ...]:
    """A string, a list of strings, a list of token ids or a list of such lists; all of one kind."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise _bad_prompt("expected a string, an array of strings, an array of token ids or an array of such arrays")
    if not value:
        raise RequestError("Invalid 'prompt': the array is empty; at least one prompt is needed.", param="prompt")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(type(item) is int for item in value):
        return (tuple(value),)
    if all(isinstance(item, list) for item in value):
        return tuple(_token_ids(item, number) for number, item in enumerate(value))
    raise _bad_prompt("an array of prompts holds either strings, or token ids, or arrays of token ids")


def _token_ids(item: list[object], number: int) -> tuple[int, ...]:
    ids = tuple(token for token in item if type(token) is int)
    if len(ids) != len(item):
        raise _bad_prompt("token ids are integers", param=f"prompt[{number}]")
    return ids


def _bad_prompt(what: str, *, param: str = "prompt") -> RequestError:
    return RequestError(f"Invalid type for '{param}': {what}.", param=param, code="invalid_type")


class CompletionRequest(FormattedFields, GeneratingFields):
    ignored = IGNORED_FIELDS
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "spaces_between_special_tokens": (True,),
        "store": (False,),
        "suffix": ("",),
        "use_beam_search": (False,),
    }

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(parse_prompts)]
    best_of: int | None = Field(None, ge=1)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool = False
    add_special_tokens: bool = True

    @property
    def num_drawn(self) -> int:
        """Choices to make of each prompt, of which the `n` best are sent."""
        return self.best_of if self.best_of is not None else self.n

    def without_answer(self) -> Self:
        """The same prompts, and nothing asked of answers that there will not be."""
        return self.model_copy(update={"n": 1, "best_of": None, "echo": False, "logprobs": None})

    @model_validator(mode="after")
    def check_best_of(self) -> Self:
        if self.best_of is None:
            return self
        if self.best_of < self.n:
            raise RequestError(
                f"Invalid 'best_of': it must be at least 'n' ({self.n}), but got {self.best_of}.", param="best_of"
            )
        if self.stream and self.best_of > self.n:
            raise RequestError("'best_of' greater than 'n' cannot be used with 'stream'.", param="best_of")
        return self
