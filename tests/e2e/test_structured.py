"""The default model generates four answers in each form, and every answer must follow its form.

The tests print the number of answers; `-rP` shows it.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence

import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from motet.deploy.child import ChildServer
from motet.models.smollm2 import DEFAULT_MODEL
from tests.structured.forms import FORMS, Form
from tests.structured.oracle import SchemaOracle
from tests.structured.questions import N, Question, QuestionOutcome, outcome_of
from tests.structured.schemas.case import SchemaCase
from tests.structured.schemas.every import CASES
from tests.structured.test_schemas import compiled
from tests.structured.walk import can_start

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.anyio]

Record = Callable[[str, object], None]
ATTEMPTS = 4


def question_of_schema(case: SchemaCase) -> Question:
    grammar = compiled(case)
    return Question(
        case.name,
        f"{case.message} Answer with JSON.",
        {"response_format": {"type": "json_schema", "json_schema": {"name": case.name, "schema": case.schema}}},
        errors=SchemaOracle(case.schema).errors,
        can_start=lambda text: can_start(grammar, text),
        few_answers=case.few_answers,
    )


def question_of_form(form: Form) -> Question:
    return Question(
        form.name,
        form.message,
        {"structured_outputs": form.structured_outputs},
        errors=lambda text: "" if form.follows(text) else "it does not follow the form",
        can_start=lambda text: False,  # all answers are short
        few_answers=form.few_answers,
    )


async def outcome(
    server: ChildServer, questions: Sequence[Question], record: Record, *, attempt: int = 0
) -> QuestionOutcome:
    started = time.monotonic()
    http = DefaultAsyncHttpxClient(verify=False)
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0, http_client=http) as client:
        result = await outcome_of(client, questions, attempt=attempt)
    summary = f"{len(questions)} forms, {result}; {time.monotonic() - started:.0f} s"
    record("structured", summary)
    sys.stdout.write(summary + "\n")
    return result


@pytest.mark.parametrize("cases", [CASES[::8], pytest.param(CASES, marks=pytest.mark.long)], ids=["some", "all"])
async def test_all_answers_follow_their_schemas(
    cases: Sequence[SchemaCase], default_server: ChildServer, record_property: Record
) -> None:
    """The last bits of the logits differ between processors, and so do these answers. If all four answers to a question
    are truncated or equal, it is sent again. `tests/structured` also walks through the grammar of every schema."""
    questions = [question_of_schema(case) for case in cases]
    result = await outcome(default_server, questions, record_property)
    assert result.invalid == []
    assert result.num_valid + result.num_truncated == N * len(cases)
    assert result.num_truncated < N * len(cases) / 4
    again = [one for one in questions if one.name not in result.with_valid - result.all_equal]
    assert len(again) < max(len(cases) / 20, 6)
    for attempt in range(1, ATTEMPTS):
        result = await outcome(default_server, again, record_property, attempt=attempt)
        assert result.invalid == []
        again = [one for one in again if one.name not in result.with_valid - result.all_equal]
    assert [one.name for one in again] == []


async def test_objects_have_the_properties_that_the_schema_names_and_no_others(
    default_server: ChildServer, record_property: Record
) -> None:
    """The bug: the standard allows any other property, and the model generated keys until it reached `max_tokens`."""
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["name", "age"]}
    http = DefaultAsyncHttpxClient(verify=False)
    async with AsyncOpenAI(base_url=f"{default_server.url}/v1", api_key="k", max_retries=0, http_client=http) as client:
        answer = await client.chat.completions.create(
            model=DEFAULT_MODEL,
            messages=[{"role": "user", "content": "Name a person and their age. Answer with JSON."}],
            extra_body={"structured_outputs": {"json": schema}},
            n=16,
            seed=1,
            max_tokens=160,
        )
    complete = [choice.message.content or "" for choice in answer.choices if choice.finish_reason == "stop"]
    assert answer.usage is not None
    record_property("structured", f"16 answers, {len(complete)} complete, {answer.usage.completion_tokens} tokens")
    assert len(complete) >= 12
    assert {tuple(json.loads(text)) for text in complete} == {("name", "age")}


@pytest.mark.long
async def test_all_answers_follow_their_regular_expressions_choices_and_grammars(
    default_server: ChildServer, record_property: Record
) -> None:
    result = await outcome(default_server, [question_of_form(form) for form in FORMS], record_property)
    assert result.invalid == []
    assert (result.num_valid, result.num_truncated) == (N * len(FORMS), 0)
    assert len(result.all_equal) < len(FORMS) / 4
