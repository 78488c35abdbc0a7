"""`group`, a field next to `n`: the policy of a group (`motet.policies`), which ends and starts its choices."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, PlainValidator, model_validator

from motet.api.generation.request_fields import StreamingFields
from motet.api.http.failure import FieldError, invalid_type, invalid_value
from motet.api.http.schema import Schema
from motet.policies.confidence import ConfidenceRule
from motet.policies.criteria import Agree, AnyOf, Condition, Finished, Posterior, Window
from motet.policies.extract import Extract, ExtractError, ExtractKind
from motet.policies.steering import GroupPolicy, Keep, Refill

PARAM = "group"
MAX_CONDITIONS = 8
MAX_WINDOW = 8192
"""Maximum number of tokens in a window of confidence."""
DEFAULT_TOP = 20
DEFAULT_PERCENTILE = 10.0
NAMED = (ExtractKind.LAST_LINE, ExtractKind.LAST_NUMBER, ExtractKind.BOXED)
WITH_SOURCE = (ExtractKind.REGEX, ExtractKind.JSON_POINTER)


class _ExtractObject(BaseModel):
    """The object form of `extract`, for the OpenAPI document."""

    regex: str | None = None
    json_pointer: str | None = None


def _extract(value: object) -> Extract:
    if isinstance(value, Extract):
        return value
    if isinstance(value, str) and value in NAMED:
        return Extract(ExtractKind(value))
    given = value.items() if isinstance(value, dict) else ()
    sources = [(name, source) for name, source in given if source is not None]
    if len(sources) != 1 or sources[0][0] not in WITH_SOURCE:
        ways = f"one of {', '.join(NAMED)}, or an object with one of {' and '.join(WITH_SOURCE)}"
        raise FieldError(invalid_value, None, f"expected {ways}")
    ((name, source),) = sources
    if not isinstance(source, str):
        raise FieldError(invalid_type, name, "a string")
    try:
        return Extract(ExtractKind(name), source)
    except ExtractError as exc:
        raise FieldError(invalid_value, name, str(exc)) from exc


ExtractField = Annotated[
    Extract,
    PlainValidator(_extract, json_schema_input_type=Literal["last_line", "last_number", "boxed"] | _ExtractObject),
]


class StopWhen(Schema):
    """The condition under which a group ends early. Exactly one field must be given in addition to `extract`."""

    finished: int | None = Field(None, ge=1)
    """The group ends when this many choices have finished."""
    agree: int | None = Field(None, ge=1)
    """The group ends when this many choices have the same value."""
    posterior: float | None = Field(None, gt=0.5, lt=1)
    """The group ends when the leading value is the most likely one with at least this probability."""
    window: int | None = Field(None, ge=2)
    """The group ends when this many choices with consecutive indices have the same value."""
    any_of: list["StopWhen"] | None = Field(None, min_length=1, max_length=MAX_CONDITIONS)
    extract: ExtractField | None = None
    """See `GroupFields.extract`."""

    @model_validator(mode="after")
    def check_one_given(self) -> Self:
        names = ("finished", "agree", "posterior", "window", "any_of")
        if sum(getattr(self, name) is not None for name in names) != 1:
            raise FieldError(invalid_value, None, f"exactly one of {', '.join(names)} must be given")
        if self.any_of is not None and any(inner.any_of is not None for inner in self.any_of):
            raise FieldError(invalid_value, "any_of", "its conditions cannot be any_of themselves")
        return self

    def extracts(self) -> list[Extract]:
        """Returns every `extract` of the condition and the conditions inside it."""
        own = [] if self.extract is None else [self.extract]
        return own + [extract for inner in self.any_of or () for extract in inner.extracts()]

    def condition(self, n: int, *, param: str) -> Condition:
        """Returns the condition. Raises RequestError for one that `n` choices can never meet."""
        for name in ("finished", "agree", "window"):
            if (count := getattr(self, name)) is not None and count > n:
                raise invalid_value(f"{param}.{name}", f"it is {count}, and the group has {n} choices")
        if self.any_of is not None:
            inner = (when.condition(n, param=f"{param}.any_of[{number}]") for number, when in enumerate(self.any_of))
            return AnyOf(tuple(inner))
        if self.finished is not None:
            return Finished(self.finished)
        if self.agree is not None:
            return Agree(self.agree)
        if self.window is not None:
            return Window(self.window)
        assert self.posterior is not None  # exactly one is given
        return Posterior(self.posterior)


class ConfidenceFields(Schema):
    """The rule that ends a choice because its confidence is too low."""

    window: int = Field(ge=1, le=MAX_WINDOW)
    """Number of tokens over which the confidence of a choice is averaged."""
    below: float | None = None
    """The threshold."""
    warm_up: int | None = Field(None, ge=1)
    """Number of choices that run to their end first and determine the threshold."""
    percentile: float = Field(DEFAULT_PERCENTILE, gt=0, le=100)
    """The threshold is this percentile of the lowest confidences of the warm-up choices."""
    top: int = Field(DEFAULT_TOP, ge=1)
    """Number of most likely tokens whose log-probabilities determine the confidence of a token."""

    @model_validator(mode="after")
    def check_one_threshold(self) -> Self:
        if (self.below is None) == (self.warm_up is None):
            raise FieldError(invalid_value, None, "exactly one of below and warm_up must be given")
        if self.warm_up is None and "percentile" in self.model_fields_set:
            raise FieldError(invalid_value, "percentile", "it has an effect only with warm_up")
        return self

    def rule(self, n: int, *, max_top: int) -> ConfidenceRule:
        """Returns the rule. `max_top`: the server's maximum number of alternatives to a token."""
        param = f"{PARAM}.confidence"
        if self.warm_up is not None and self.warm_up > n:
            raise invalid_value(f"{param}.warm_up", f"it is {self.warm_up}, and the group has {n} choices")
        if max_top == 0:
            raise invalid_value(param, "this server reports no log-probabilities of other tokens (--max-logprobs 0)")
        if self.top > max_top and "top" in self.model_fields_set:
            raise invalid_value(f"{param}.top", f"it is {self.top}, and this server allows {max_top} (--max-logprobs)")
        top, warm_up = min(self.top, max_top), self.warm_up or 0
        return ConfidenceRule(
            window=self.window, top=top, below=self.below, warm_up=warm_up, percentile=self.percentile
        )


class GroupFields(Schema):
    stop_when: StopWhen | None = None
    extract: ExtractField | None = None
    """How the value of an answer is found in its text."""
    start: int | None = Field(None, ge=1)
    """Maximum number of choices that generate at the same time; more start while `stop_when` is not met."""
    refill: Literal["each", "all"] = "each"
    """With `start`: a choice starts when another ends, or the next choices start together when all have ended."""
    confidence: ConfidenceFields | None = None
    keep: Literal["all", "finished"] = "all"
    """The choices in the answer: all that started, or all that were not ended early."""
    vote: bool = False
    """True if the answer reports the value of each choice, and the majority."""
    deterministic: bool = False
    """True if decisions depend on numbers of tokens, and not on the time at which tokens arrive."""

    @model_validator(mode="after")
    def check_extract(self) -> Self:
        if len(set(self._extracts())) > 1:
            raise FieldError(invalid_value, "extract", "a group has one way to find values; give only one")
        if self.start is None and self.refill != "each":
            raise FieldError(invalid_value, "refill", "it has an effect only with start")
        return self

    def _extracts(self) -> list[Extract]:
        inner = [] if self.stop_when is None else self.stop_when.extracts()
        return inner if self.extract is None else [self.extract, *inner]

    def policy(self, n: int, *, max_top: int) -> GroupPolicy:
        """Returns the policy of a group of `n` choices. `max_top`: see `ConfidenceFields.rule`. Raises RequestError if
        such a group cannot have it."""
        condition = None if self.stop_when is None else self.stop_when.condition(n, param=f"{PARAM}.stop_when")
        if self.start is not None and self.start > n:
            raise invalid_value(f"{PARAM}.start", f"it is {self.start}, and the group has {n} choices")
        extract = next(iter(self._extracts()), None)
        if extract is None and (self.vote or (condition is not None and condition.needs_values)):
            field = "vote" if self.vote else "stop_when"
            why = f"{PARAM}.{field} compares values, so extract must say how to find them"
            raise invalid_value(f"{PARAM}.extract", why)
        return GroupPolicy(
            stop_when=condition,
            extract=extract,
            start=self.start,
            refill=Refill(self.refill),
            confidence=None if self.confidence is None else self.confidence.rule(n, max_top=max_top),
            keep=Keep(self.keep),
            vote=self.vote,
            deterministic=self.deterministic,
        )


class SteeredFields(Schema):
    """The policy of the groups, on routes whose groups can have one."""

    group: GroupFields | None = None


def check_keep(fields: StreamingFields, group: GroupFields | None) -> None:
    """Refuses `keep` in a stream, which would omit choices that it has already sent."""
    if group is not None and group.keep != "all":
        fields.refuse_if_streamed(f"{PARAM}.keep", group.keep)
