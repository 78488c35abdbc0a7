"""The questions of `POST /v1/decisions`, in the shape of OpenAI's Decisions API. The type determines the answers:

    predicate   a condition                          `yes` and `no`
    choice      one of several values                the values
    score       one of several levels, in order      the numbers of the levels, from 0

`prompt` is the text that is added to the input, and `answers` are the texts whose probabilities are read."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

from motet.api.http.failure import FieldError, invalid_type, invalid_value, missing_parameter
from motet.api.http.schema import UNICODE, Schema, check_unicode, schema_text
from motet.api.openai.chat_schema import joined
from motet.api.openai.responses_schema import TextPart
from motet.api.scoring.answer_reads import Distribution

MAX_CHOICES = 255
MAX_LEVELS = 10


def json_as_text(part: object) -> object:
    """Returns a part with JSON (`input_json`) as a part with its text, and any other part unchanged."""
    if not isinstance(part, dict) or part.get("type") != "input_json":
        return part
    data = part.get("data")
    if not isinstance(data, dict | list) or not all(isinstance(item, dict) for item in data if isinstance(data, list)):
        raise FieldError(invalid_type, None, "an object, or an array of objects, in 'data'")
    check_unicode(data)
    return {"type": "input_text", "text": schema_text(data)}


def as_text_parts(content: object) -> object:
    """Returns a text as a list with one part, and a list of parts without JSON."""
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    return [json_as_text(part) for part in content] if isinstance(content, list) else content


def _check_parts(parts: list[TextPart]) -> list[TextPart]:
    if not check_unicode(joined(parts)).strip():
        raise FieldError(invalid_value, None, "it is empty")
    return parts


def _check_given(text: str) -> str:
    if not text.strip():
        raise FieldError(invalid_value, None, "it is empty")
    return text


Instructions = Annotated[
    list[TextPart],
    BeforeValidator(as_text_parts, json_schema_input_type=str | list[dict[str, object]]),
    AfterValidator(_check_parts),
]
Description = Annotated[str, UNICODE]
GivenText = Annotated[str, UNICODE, AfterValidator(_check_given)]


class Question(Schema):
    """A question about the input of a request."""

    name: Annotated[str, UNICODE] | None = None
    instructions: Instructions

    @property
    @abstractmethod
    def answers(self) -> Sequence[str]:
        """The texts of the answers. No two are equal, and none is empty."""

    @property
    @abstractmethod
    def prompt(self) -> str:
        """The question as the model gets it, without white space at its start and end."""

    @abstractmethod
    def answer_param(self, number: int) -> str:
        """Returns the name of the field with an answer, for errors. `number`: index of the answer."""

    @abstractmethod
    def result(self, distribution: Distribution) -> Mapping[str, object]:
        """Returns the fields of the answer after its type and its name, from the probabilities of `answers`."""

    @property
    def text(self) -> str:
        return joined(self.instructions).strip()


class PredicateQuestion(Question):
    type: Literal["predicate"]

    @property
    def answers(self) -> Sequence[str]:
        return "yes", "no"

    @property
    def prompt(self) -> str:
        return f"Condition: {self.text}\nIs this true of the text above? Answer with yes or no only."

    def answer_param(self, number: int) -> str:
        return "type"

    def result(self, distribution: Distribution) -> Mapping[str, object]:
        return {"probability": distribution.probabilities[0]}


def _check_value(value: object) -> object:
    if not isinstance(value, str | bool):
        raise FieldError(invalid_type, None, "a string or a boolean")
    return value if isinstance(value, bool) else _check_given(check_unicode(value))


class Choice(Schema):
    value: Annotated[str | bool, PlainValidator(_check_value, json_schema_input_type=str | bool)]
    description: Description = ""


def _line(start: str, description: str) -> str:
    return f"{start}: {description.strip()}" if description.strip() else start


class ChoiceQuestion(Question):
    type: Literal["choice"]
    choices: list[Choice] = Field(min_length=2, max_length=MAX_CHOICES)

    @model_validator(mode="after")
    def check_choices(self) -> "ChoiceQuestion":
        check_different(self.answers, "choices", member="value")
        return self

    @property
    def answers(self) -> Sequence[str]:
        """The values. If one of them is a boolean, all are written as JSON: `true` is not the string `"true"`."""
        as_json = any(isinstance(choice.value, bool) for choice in self.choices)
        return [schema_text(choice.value) if as_json else str(choice.value) for choice in self.choices]

    @property
    def prompt(self) -> str:
        given = zip(self.answers, self.choices, strict=True)
        options = (_line(f"- {text}", choice.description) for text, choice in given)
        return "\n".join([f"Question: {self.text}", *options, "Answer with one of these values only."])

    def answer_param(self, number: int) -> str:
        return f"choices[{number}].value"

    def result(self, distribution: Distribution) -> Mapping[str, object]:
        values = [choice.value for choice in self.choices]
        listed = zip(values, distribution.probabilities, strict=True)
        return {
            "choice": values[distribution.best],
            "probabilities": [{"value": value, "probability": probability} for value, probability in listed],
            "confidence": distribution.confidence,
        }


class Level(Schema):
    label: GivenText
    description: Description = ""


class ScoreQuestion(Question):
    type: Literal["score"]
    levels: list[Level] = Field(min_length=2, max_length=MAX_LEVELS)

    @model_validator(mode="after")
    def check_levels(self) -> "ScoreQuestion":
        check_different([level.label for level in self.levels], "levels", member="label")
        return self

    @property
    def answers(self) -> Sequence[str]:
        return [str(number) for number in range(len(self.levels))]

    @property
    def prompt(self) -> str:
        levels = (_line(f"{number}: {level.label}", level.description) for number, level in enumerate(self.levels))
        return "\n".join([f"Question: {self.text}", *levels, "Answer with the number of one of these levels only."])

    def answer_param(self, number: int) -> str:
        return f"levels[{number}]"

    def result(self, distribution: Distribution) -> Mapping[str, object]:
        listed = enumerate(zip(self.levels, distribution.probabilities, strict=True))
        return {
            "score": distribution.mean,
            "probabilities": [
                {"value": number, "label": level.label, "probability": probability}
                for number, (level, probability) in listed
            ],
            "confidence": distribution.confidence,
        }


def check_different(texts: Sequence[str], field: str, *, member: str) -> None:
    """Raises FieldError for a text that is equal to an earlier one."""
    first: dict[str, int] = {}
    for number, text in enumerate(texts):
        if (other := first.setdefault(text, number)) != number:
            raise FieldError(
                invalid_value, f"{field}[{number}].{member}", f"it is equal to '{field}[{other}].{member}'"
            )


AnyQuestion = PredicateQuestion | ChoiceQuestion | ScoreQuestion
TYPES: Mapping[str, type[AnyQuestion]] = {
    "predicate": PredicateQuestion,
    "choice": ChoiceQuestion,
    "score": ScoreQuestion,
}


def read_question(value: object) -> AnyQuestion:
    """Reads a question by its type, so that errors name the fields of this type."""
    if not isinstance(value, dict):
        raise FieldError(invalid_type, None, "an object")
    if (kind := value.get("type")) is None:
        raise FieldError(missing_parameter, "type")
    if not isinstance(kind, str) or kind not in TYPES:
        raise FieldError(invalid_value, "type", f"expected {', '.join(map(repr, TYPES))}")
    return TYPES[kind].model_validate(value)
