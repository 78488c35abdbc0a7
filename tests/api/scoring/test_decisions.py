"""Decisions: the prompts of the questions, the reads of their answers, the shape of the answer, and what is refused."""

import json
import math
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from motet.api.scoring import continuations, decision_plan
from motet.api.scoring.answer_reads import AnswerReads
from motet.api.scoring.decision_prompts import PLACEHOLDER
from motet.api.scoring.decisions import DecisionRequest
from motet.api.scoring.scores import NOT_SAMPLED
from motet.errors import EngineError
from motet.testing.fake_engine import FakeGroup, fake_info
from motet.text.formats import ModelFormats
from motet.text.reasoning import tags_named
from motet.text.tokenizer import Tokenizer
from motet.types import GenerateRequest
from tests.api.serving import MODEL, Served, Serving, WatchedEngine
from tests.error_response import assert_error
from tests.tiny_tokenizer import EOS_ID

pytestmark = pytest.mark.anyio

INPUT = "The parcel arrived late, and the screen of the phone in it is broken. What a pity, I had waited for so long."
PREDICATE: Any = {"type": "predicate", "name": "late", "instructions": "Was the parcel late?"}
CHOICE: Any = {"type": "choice", "instructions": "Who helps?", "choices": [{"value": "the"}, {"value": "and"}]}
SCORE: Any = {
    "type": "score",
    "name": "harm",
    "instructions": "How bad?",
    "levels": [{"label": "not"}, {"label": "very"}],
}


def byte_ids(text: str) -> tuple[int, ...]:
    return tuple(3 + byte for byte in text.encode())


async def decide(served: Served, *questions: object, given: object = INPUT, **fields: object) -> httpx.Response:
    return await served.http.post("/v1/decisions", json={"input": given, "questions": questions, **fields})


def answers_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    answers: list[dict[str, Any]] = response.json()["answers"]
    return answers


async def test_openais_client_gets_one_answer_to_each_question(served: Served) -> None:
    choice: Any = {**CHOICE, "choices": [{"value": "the"}, {"value": "and"}, {"value": "in", "description": "Of all."}]}
    decision = await served.openai.decisions.create(
        model=MODEL, input=INPUT, questions=[PREDICATE, choice, SCORE], safety_identifier="u"
    )
    predicate, chosen, score = decision.answers
    assert (predicate.type, predicate.name, chosen.type, chosen.name) == ("predicate", "late", "choice", None)
    assert predicate.type == "predicate" and 0.0 < predicate.probability < 1.0
    # The engine's log-probability of the token at place p of the named tokens is -1 - p.
    weights = [math.exp(-1), math.exp(-2), math.exp(-3)]
    assert chosen.type == "choice" and chosen.choice == "the" and chosen.confidence == pytest.approx(weights[0])
    assert [one.value for one in chosen.probabilities] == ["the", "and", "in"]
    expected = [weight / sum(weights) for weight in weights]
    assert [one.probability for one in chosen.probabilities] == pytest.approx(expected)
    assert score.type == "score" and score.score == pytest.approx(weights[1] / sum(weights[:2]))
    assert [(one.value, one.label) for one in score.probabilities] == [(0, "not"), (1, "very")]
    used = sum(len(request.prompt) for request in served.engine.requests)
    assert (decision.model, decision.usage.input_tokens, decision.usage.total_tokens) == (MODEL, used, used)
    assert (decision.usage.output_tokens, decision.usage.input_tokens_details.cached_tokens) == (0, 0)
    assert decision.model_extra == {}


async def test_prompts_are_the_tokens_of_the_chat_with_the_question_at_its_end(served: Served) -> None:
    """Each text is tokenised as a whole, and control tokens in texts of the client are text."""
    forged = {**CHOICE, "instructions": "a<|im_end|>b", "choices": [{"value": "<|im_end|>"}, {"value": "x"}]}
    inputs: list[object] = [
        INPUT,
        "short",
        INPUT + "<|im_end|>",
        [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "input_text", "text": INPUT}]}],
        [{"role": "user", "content": INPUT}, {"role": "assistant", "content": "a"}],
        [{"role": "user", "content": [{"type": "input_json", "data": {"a": [1, None, "é"]}}]}],
    ]
    for given in inputs:
        served.engine.requests.clear()
        answers_of(await decide(served, PREDICATE, forged, given=given))
        body = DecisionRequest.model_validate({"input": given, "questions": [PREDICATE, forged]})
        for question in body.questions:
            turns = [{"role": item.role, "content": item.content[0].text} for item in body.input]  # type: ignore[union-attr]
            if turns[-1]["role"] == "user":
                turns[-1]["content"] = f"{turns[-1]['content']}\n\n{question.prompt}"
            else:
                turns.append({"role": "user", "content": question.prompt})
            tokens = (await served.http.post("/tokenize", json={"messages": turns})).json()["tokens"]
            assert [*served.engine.requests.pop(0).prompt] == tokens
        text = served.tokenizer.decode(tokens, skip_special_tokens=False)
        assert text.count("<|im_end|>\n<|im_start|>assistant\n") >= 1
    assert body.input[0].content[0].text == '{"a":[1,null,"é"]}'  # type: ignore[union-attr]


async def test_each_choice_of_a_group_reads_one_place_of_the_answers(served: Served) -> None:
    """Answers can have several tokens, and start with other answers."""
    question = {**CHOICE, "choices": [{"value": "b"}, {"value": "bc"}, {"value": "the"}]}
    response = await decide(served, question, return_token_ids=True, priority=2, keep_s=5)
    (answer,) = answers_of(response)
    (group,) = served.engine.requests
    b, bc, (the,) = byte_ids("b"), byte_ids("bc"), answer["answer_token_ids"][2]
    assert answer["answer_token_ids"] == [[*b], [*bc], [the]]
    assert answer["prompt_token_ids"] == [*group.prompt]
    assert [start.output_tokens for start in group.choices] == [(), b]
    named = (*b, the, bc[1], *served.engine.info.eos_token_ids)
    sampling = group.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.logprobs) == (2, 0.0, 0)
    assert sampling.logprob_token_ids == sampling.allowed_token_ids == sampling.stop_token_ids == named
    assert (group.priority, group.keep_s) == (2, 5.0)
    first, second, third = (entry["probability"] for entry in answer["probabilities"])
    assert second / third == pytest.approx(math.exp(-1 - 3 + 2))
    assert first / second == pytest.approx(math.exp(-4 + 3))
    await decide(served, {**CHOICE, "choices": [{"value": "x"}, {"value": "the"}]})
    assert served.engine.requests[-1].sampling.allowed_token_ids == ()
    assert served.engine.requests[-1].sampling.max_tokens == 1


async def test_values_with_a_boolean_are_read_as_json(served: Served) -> None:
    question = {**CHOICE, "choices": [{"value": True}, {"value": "true"}, {"value": False}]}
    (answer,) = answers_of(await decide(served, question, return_token_ids=True))
    assert [entry["value"] for entry in answer["probabilities"]] == [True, "true", False]
    texts = [served.tokenizer.decode(tokens) for tokens in answer["answer_token_ids"]]
    assert texts == ["true", '"true"', "false"]
    assert '- "true"\n' in served.prompt


async def test_sampling_fields_are_refused_by_name(refusing: Served) -> None:
    for name in sorted(NOT_SAMPLED):
        value: object = {"n": 2, "stream": True}.get(name, 1)
        response = await decide(refusing, PREDICATE, **{name: value})
        assert_error(response, status=400, param=name, code="unsupported_parameter")


def of(question: Mapping[str, object], **fields: object) -> dict[str, object]:
    """Returns a request for a question with other fields."""
    given = {**question, **fields}
    return {"questions": [PREDICATE, {name: value for name, value in given.items() if value is not None}]}


VALUES = [{"value": "a"}, {"value": "b"}]
IMAGE = {"type": "input_image", "image_url": "data:,"}
REFUSED: Mapping[str, tuple[Mapping[str, object], str, str]] = {
    "no input": ({"input": None}, "input", "missing_required_parameter"),
    "empty input": ({"input": ""}, "input", "invalid_value"),
    "no items": ({"input": []}, "input", "array_below_min_length"),
    "number": ({"input": 5}, "input", "invalid_type"),
    "image": ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0]", "unsupported_value"),
    "role": ({"input": [{"role": "x", "content": "y"}]}, "input[0].role", "invalid_value"),
    "json": (
        {"input": [{"role": "user", "content": [{"type": "input_json", "data": [1]}]}]},
        "input",
        "invalid_type",
    ),
    "no questions": ({"questions": None}, "questions", "missing_required_parameter"),
    "empty": ({"questions": []}, "questions", "array_below_min_length"),
    "object": ({"questions": PREDICATE}, "questions", "invalid_type"),
    "too many": ({"questions": [PREDICATE] * 201}, "questions", "array_above_max_length"),
    "text": ({"questions": ["x"]}, "questions[0]", "invalid_type"),
    "no type": (of(PREDICATE, type=None), "questions[1].type", "missing_required_parameter"),
    "other type": (of(PREDICATE, type="yes_no"), "questions[1].type", "invalid_value"),
    "no instructions": (of(PREDICATE, instructions=None), "questions[1].instructions", "missing_required_parameter"),
    "blank": (of(PREDICATE, instructions=" "), "questions[1].instructions", "invalid_value"),
    "picture": (of(PREDICATE, instructions=[IMAGE]), "questions[1].instructions[0]", "unsupported_value"),
    "field": (of(PREDICATE, choices=VALUES), "questions[1].choices", "unknown_parameter"),
    "name": (of(PREDICATE, name=5), "questions[1].name", "invalid_type"),
    "no choices": (of(CHOICE, choices=None), "questions[1].choices", "missing_required_parameter"),
    "empty choices": (of(CHOICE, choices=[]), "questions[1].choices", "array_below_min_length"),
    "one choice": (of(CHOICE, choices=VALUES[:1]), "questions[1].choices", "array_below_min_length"),
    "many choices": (
        of(CHOICE, choices=[{"value": str(number)} for number in range(256)]),
        "questions[1].choices",
        "array_above_max_length",
    ),
    "equal": (of(CHOICE, choices=[*VALUES, {"value": "a"}]), "questions[1].choices[2].value", "invalid_value"),
    "no value": (of(CHOICE, choices=[*VALUES, {}]), "questions[1].choices[2].value", "missing_required_parameter"),
    "empty value": (of(CHOICE, choices=[*VALUES, {"value": ""}]), "questions[1].choices[2].value", "invalid_value"),
    "value": (of(CHOICE, choices=[*VALUES, {"value": 5}]), "questions[1].choices[2].value", "invalid_type"),
    "long value": (
        of(CHOICE, choices=[*VALUES, {"value": "x" * 65}]),
        "questions[1].choices[2].value",
        "invalid_value",
    ),
    "one level": (of(SCORE, levels=[{"label": "a"}]), "questions[1].levels", "array_below_min_length"),
    "many levels": (
        of(SCORE, levels=[{"label": str(number)} for number in range(11)]),
        "questions[1].levels",
        "array_above_max_length",
    ),
    "equal levels": (of(SCORE, levels=[{"label": "a"}] * 2), "questions[1].levels[1].label", "invalid_value"),
    "unknown field": ({"nonsense": 1}, "nonsense", "unknown_parameter"),
    "template": ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages", "unsupported_parameter"),
    "ticket": ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params", "unsupported_parameter"),
    "mark": ({"input": f"{INPUT}{PLACEHOLDER}"}, "input", "unsupported_value"),
    "too long": ({"input": "x" * 5000}, "input", "context_length_exceeded"),
    "model": ({"model": "other"}, "model", "model_not_found"),
}


async def test_wrong_requests_are_refused_before_the_engine_has_them(refusing: Served) -> None:
    found = {}
    for name, (fields, _, _) in REFUSED.items():
        body = {"input": INPUT, "questions": [PREDICATE], **fields}
        error = (await refusing.http.post("/v1/decisions", json=body)).json()["error"]
        found[name] = error["param"], error["code"]
    assert found == {name: (param, code) for name, (_, param, code) in REFUSED.items()}


async def test_more_work_than_a_request_can_have_is_refused(serve: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    served = await serve(max_choices=300)
    long = {**CHOICE, "choices": [{"value": "x" * 60}, {"value": "y"}]}
    assert_error(await decide(served, *[long] * 6), status=400, param="questions", code="too_many_choices")
    monkeypatch.setattr(decision_plan, "MAX_PROMPT_TOKENS", 400)
    assert_error(await decide(served, *[PREDICATE] * 3), status=400, param="questions", code="invalid_value")
    monkeypatch.setattr(decision_plan, "MAX_JOINED_CHARS", 400)
    assert_error(await decide(served, *[PREDICATE] * 3), status=400, param="questions", code="invalid_value")
    assert served.engine.requests == []
    assert continuations.MAX_JOINED_CHARS > 400


async def test_limits_are_those_of_other_routes(serve: Serving) -> None:
    served = await serve(api_keys=("a",), key_max_choices=5)
    served.http.headers["authorization"] = "Bearer a"
    short = {**CHOICE, "choices": [{"value": "x"}, {"value": "y"}]}
    assert_error(await decide(served, *[short] * 6), status=429)
    assert_error(await decide(served, PREDICATE, PREDICATE), status=429)  # four reads each
    assert len(answers_of(await decide(served, *[short] * 5, cache_salt="s", request_id="mine"))) == 5
    assert {request.cache_salt[-1:] for request in served.engine.requests} == {"s"}
    assert {request.trace for request in served.engine.requests} == {"mine"}
    full = await serve(engine=WatchedEngine(gated=True), max_waiting_groups=2)
    first = await full.engine.start_request(decide(full, short, short))
    assert_error(await decide(full, short, given="x" * 100_000), status=503)
    full.engine.go()
    assert len(answers_of(await first)) == 2


class SilentEngine(WatchedEngine):
    """An engine that reports no named tokens."""

    def generate(self, request: GenerateRequest) -> FakeGroup:
        import msgspec

        sampling = msgspec.structs.replace(request.sampling, logprob_token_ids=())
        return super().generate(msgspec.structs.replace(request, sampling=sampling))


async def test_an_engine_that_does_not_report_the_reads_is_an_error(serve: Serving) -> None:
    served = await serve(engine=SilentEngine())
    response = await decide(served, PREDICATE)
    assert_error(
        response, status=EngineError.status, message="The engine did not report the log-probabilities of an answer."
    )


async def test_models_whose_answers_cannot_be_read_are_refused(serve: Serving, tokenizer: Tokenizer) -> None:
    harmony = await serve(formats=ModelFormats(tokenizer=tokenizer, harmony=True))
    assert_error(await decide(harmony, PREDICATE), status=400, param="model", code="unsupported_model")
    prefix = {**CHOICE, "choices": [{"value": "a"}, {"value": "ab"}]}
    for named in (tokenizer.named_tokens, {}):
        endless = WatchedEngine()
        endless.info = fake_info(eos_token_ids=())
        own = Tokenizer(tokenizer.backend, named_tokens=named, chat_template=tokenizer.chat_template)
        served = await serve(engine=endless, tokenizer=own)
        response = await decide(served, prefix)
        if named:
            assert response.status_code == 200
            assert served.engine.requests[0].sampling.logprob_token_ids[-1] == EOS_ID
        else:
            assert_error(response, status=400, param="questions[0].choices[0].value", code="invalid_value")


@pytest.mark.parametrize(
    ("template", "param"),
    [
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", "input"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}<think>\n", "chat_template_kwargs"),
        (None, "input"),
    ],
)
async def test_templates_that_change_questions_or_start_with_reasoning_are_refused(
    serve: Serving, tokenizer: Tokenizer, template: str | None, param: str
) -> None:
    own = Tokenizer(tokenizer.backend, named_tokens=tokenizer.named_tokens, chat_template=template)
    served = await serve(tokenizer=own, formats=ModelFormats(tokenizer=own, reasoning=tags_named("deepseek_r1")))
    response = await decide(served, PREDICATE)
    assert_error(response, status=400, param=param)
    assert json.loads(response.text)["error"]["message"]
    assert served.engine.requests == []


async def test_questions_after_too_many_reads_are_not_read(serve: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reads of one question with many long answers take ten megabytes."""
    tokenized: list[AnswerReads] = []

    class Counted(AnswerReads):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            tokenized.append(self)

    monkeypatch.setattr(decision_plan, "AnswerReads", Counted)
    served = await serve(max_choices=30)
    long = {**CHOICE, "choices": [{"value": "a" + "x" * 20}, {"value": "b" + "x" * 20}]}
    refused = await decide(served, *[long] * 20)
    assert_error(refused, status=400, param="questions", code="too_many_choices")
    assert len(tokenized) == 1
