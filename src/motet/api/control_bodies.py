"""The bodies of control routes, such as `/sleep`. An option is a parameter of the query, as in vLLM, or a field of the
body in one of two forms:

    {"level": 2}                                      the options
    {"model": "smollm2", "options": {"level": 2}}     as Ray's control routes have them

A field that the route does not have gets 400, so no option is dropped silently."""

from typing import Annotated, Any, ClassVar, Protocol

from pydantic import Field

from motet.api.http.failure import invalid_value
from motet.api.http.schema import Neutral, Schema
from motet.api.service import Service
from motet.control.cell_sleep import SleepTag
from motet.control.engine_control import NewRequests
from motet.types import PauseMode

MAX_LEVEL = 2
Version = Annotated[str, Field(min_length=1, max_length=200)]
"""The name of a weight version."""


class NoOptions(Schema):
    """The options of a route that has none."""


class PauseOptions(Schema):
    mode: Annotated[PauseMode | None, Field(strict=False)] = None
    new_requests: Annotated[NewRequests | None, Field(strict=False)] = None
    clear_cache: bool | None = None
    wait_for_inflight_requests: bool | None = None


class SleepOptions(Schema):
    level: Annotated[int | None, Field(ge=0, le=MAX_LEVEL)] = None
    mode: Annotated[PauseMode | None, Field(strict=False)] = None


class WakeOptions(Schema):
    tags: list[Annotated[SleepTag, Field(strict=False)]] | None = None


class ResetOptions(Schema):
    reset_running_requests: bool | None = None
    reset_external: bool | None = None


class ControlBody(Schema):
    """The body of a control route without options."""

    model: str | None = None
    options: NoOptions | None = None


class PauseBody(PauseOptions):
    model: str | None = None
    options: PauseOptions | None = None


class SleepBody(SleepOptions):
    model: str | None = None
    options: SleepOptions | None = None


class WakeBody(WakeOptions):
    model: str | None = None
    options: WakeOptions | None = None


class ResetBody(ResetOptions):
    model: str | None = None
    options: ResetOptions | None = None


class StartUpdateBody(Schema):
    """The body of /start_weight_update."""

    neutral: ClassVar[Neutral] = {"is_checkpoint_format": (True,)}

    model: str | None = None
    options: NoOptions | None = None


class _AnyBody(Protocol):
    @property
    def model(self) -> str | None: ...

    @property
    def options(self) -> Schema | None: ...

    def model_dump(self, *, exclude: set[str], exclude_none: bool) -> dict[str, Any]: ...


def options_in(body: _AnyBody | None, service: Service) -> dict[str, Any]:
    """Returns the options in a body, by name. Raises RequestError for an unknown model, and for two values of one
    option."""
    if body is None:
        return {}
    if body.model is not None:
        service.served(body.model)
    options = body.model_dump(exclude={"model", "options"}, exclude_none=True)
    nested = {} if body.options is None else body.options.model_dump(exclude_none=True)
    for name in options.keys() & nested.keys():
        if options[name] != nested[name]:
            raise invalid_value(f"options.{name}", f"'{name}' has another value", name)
    return options | nested
