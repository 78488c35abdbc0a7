"""Fields of other servers that mean the same as fields of this server: Dynamo's `nvext`, and vLLM's `request_id`."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, Field, ModelWrapValidatorHandler, model_validator

from motet.api.http.failure import FieldError, invalid_value
from motet.api.http.schema import UNICODE, Schema
from motet.session_ids import is_id

MAX_ANNOTATIONS = 64
TOKEN_IDS = "token_ids"
"""The annotation that requests token ids."""


class NvExt(Schema):
    """Dynamo's extension of OpenAI's requests. Other members, such as router hints, are ignored and reported."""

    known_entries: ClassVar[Mapping[str, frozenset[str]]] = {"annotations": frozenset({TOKEN_IDS, "request_id"})}

    ignore_eos: bool = False
    top_k: int | None = Field(None, ge=-1)
    greed_sampling: bool = False
    """True to take the most likely token, whatever the temperature is."""
    cache_salt: Annotated[str, UNICODE] = ""
    annotations: list[str] = Field(default_factory=list, max_length=MAX_ANNOTATIONS)
    """Data to add to the answer. The request's id is always in a header."""

    def as_fields(self) -> dict[str, object]:
        """Returns the fields of a request that mean the same, and that fields of the request replace."""
        fields: dict[str, object] = {}
        if self.top_k is not None:
            fields["top_k"] = self.top_k
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.cache_salt:
            fields["cache_salt"] = self.cache_salt
        if TOKEN_IDS in self.annotations:
            fields["return_token_ids"] = True
        return fields


class NvExtFields(Schema):
    """`nvext`, on routes of OpenAI's API."""

    lenient: ClassVar[Mapping[str, type[Schema]]] = {"nvext": NvExt}

    nvext: NvExt | None = None

    @model_validator(mode="wrap")
    @classmethod
    def read_extension(cls, data: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Checks the body, and then checks it again with the fields that `nvext` stands for."""
        body = handler(data)
        if not isinstance(data, dict) or body.nvext is None:
            return body
        meant = {name: value for name, value in body.nvext.as_fields().items() if name in cls.model_fields}
        greedy = {"temperature": 0.0} if body.nvext.greed_sampling else {}
        own = {name: value for name, value in data.items() if value is not None and name != "nvext"}
        return handler({**meant, **own, **greedy})


def _check_id(value: str) -> str:
    if not is_id(value):
        raise FieldError(invalid_value, None, "expected up to 200 printable characters without spaces")
    return value


class NamedRequest(Schema):
    """A request whose body can have an id chosen by the client, as in vLLM and SGLang."""

    request_id: Annotated[str, AfterValidator(_check_id)] | None = None
    """The header `x-request-id` takes precedence."""
