"""The default model is asked for four answers in each form, and no answer may leave its form.

The tests print how many answers there were; `-rP` shows it.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence

import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from motet.deploy.child import ChildServer
from motet.models.smollm2 import DEFAULT_MODEL
from tests.structured.asking import N, Outcome, Question, outcome_of
from tests.structured.forms import FORMS, Form
from tests.structured.judge import Judge
from tests.structured.schemas.case import SchemaCase
from tests.structured.schemas.every import CASES
from tests.structured.test_schemas import compiled
from tests.structured.walking import begins

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.anyio]

Record = Callable[[str, object], None]
TURNS = 4


def question_of_schema(case: SchemaCase) -> Question:
    grammar = compiled(case)
    return Question(
        case.name,
        f"{case.ask} Answer with JSON.",
        {"response_format": {"type": "json_schema", "json_schema": {"name": case.name, "schema": case.schema}}},
        faults=Judge(case.schema).faults,
        begins=lambda text: begins(grammar, text),
        few=case.few,
    )


def question_of_form(form: Form) -> Question:
    return Question(
        form.name,
        form.ask,
        {"structured_outputs": form.structured_outputs},
        faults=lambda text: "" if form.follows(text) else "it is none of them",
        begins=lambda text: False,  # they are all short
        few=form.few,
    )


async def outcome(server: ChildServer, questions: Sequence[Question], record: Record, *, turn: int = 0) -> Outcome:
    started = time.monotonic()
    http = DefaultAsyncHttpxClient(verify=False)
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0, http_client=http) as client:
        found = await outcome_of(client, questions, turn=turn)
    told = f"{len(questions)} forms, {found}; {time.monotonic() - started:.0f} s"
    record("structured", told)
    sys.stdout.write(told + "\n")
    return found


@pytest.mark.parametrize("cases", [CASES[::8], pytest.param(CASES, marks=pytest.mark.long)], ids=["some", "all"])
async def test_all_answers_follow_their_schemas(
    cases: Sequence[SchemaCase], default_server: ChildServer, record_property: Record
) -> None:
    """The last bits of the logits differ between processors, and so do these answers. If all four answers in a form
    were cut or equal, it is asked for again. `tests/structured` walks through every schema's grammar too."""
    questions = [question_of_schema(case) for case in cases]
    found = await outcome(default_server, questions, record_property)
    assert found.wrong == []
    assert found.valid + found.cut == N * len(cases)
    assert found.cut < N * len(cases) / 4
    again = [one for one in questions if one.name not in found.with_valid - found.alike]
    assert len(again) < max(len(cases) / 20, 6)
    for turn in range(1, TURNS):
        found = await outcome(default_server, again, record_property, turn=turn)
        assert found.wrong == []
        again = [one for one in again if one.name not in found.with_valid - found.alike]
    assert [one.name for one in again] == []


async def test_objects_have_the_properties_that_the_schema_names_and_no_others(
    default_server: ChildServer, record_property: Record
) -> None:
    """By the standard they may have any other; the model then wrote keys until its tokens ran out."""
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
    whole = [choice.message.content or "" for choice in answer.choices if choice.finish_reason == "stop"]
    assert answer.usage is not None
    record_property("structured", f"16 answers, {len(whole)} whole, {answer.usage.completion_tokens} tokens")
    assert len(whole) >= 12
    assert {tuple(json.loads(text)) for text in whole} == {("name", "age")}


async def test_all_answers_follow_their_regular_expressions_choices_and_grammars(
    default_server: ChildServer, record_property: Record
) -> None:
    found = await outcome(default_server, [question_of_form(form) for form in FORMS], record_property)
    assert found.wrong == []
    assert (found.valid, found.cut) == (N * len(FORMS), 0)
    assert len(found.alike) < len(FORMS) / 4
