"""Inspect: epochs, a vote of as many choices as it needs, and choices with log-probabilities, a tool and a schema."""

import asyncio
import json
from pathlib import Path
from typing import Any

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalSample
from inspect_ai.model import GenerateConfig, Model, ResponseSchema, get_model
from inspect_ai.scorer import match
from inspect_ai.solver import generate
from inspect_ai.tool import ToolFunction, ToolInfo, ToolParams
from inspect_ai.util import JSONSchema
from scene import BOAT, CITIES, KEY, MAX_TOKENS, MODEL, QUESTION, SEED, URL, is_boat, shown


async def ask(model: Model) -> None:
    several = await model.generate(
        QUESTION, config=GenerateConfig(num_choices=3, max_tokens=8, seed=SEED, logprobs=True, top_logprobs=2)
    )
    assert len(several.choices) == 3 and all(choice.logprobs for choice in several.choices)
    assert several.usage is not None and several.usage.output_tokens > 3

    schema = ResponseSchema(name="boat", json_schema=JSONSchema.model_validate(BOAT))
    formed = await model.generate(
        QUESTION, config=GenerateConfig(num_choices=2, max_tokens=MAX_TOKENS, seed=SEED, response_schema=schema)
    )
    assert len(formed.choices) == 2 and all(is_boat(choice.message.text) for choice in formed.choices)

    city = JSONSchema(type="string", enum=list(CITIES))
    weather = ToolInfo(
        name="get_weather", description="Weather.", parameters=ToolParams(properties={"city": city}, required=["city"])
    )
    called = await model.generate(
        QUESTION,
        tools=[weather],
        tool_choice=ToolFunction("get_weather"),
        config=GenerateConfig(num_choices=2, max_tokens=MAX_TOKENS, seed=SEED),
    )
    for choice in called.choices:
        (call, *_) = choice.message.tool_calls or []
        assert call.function == "get_weather" and call.arguments["city"] in CITIES, json.dumps(call.arguments)


def run(tasks: Task | str, model: Model, **options: Any) -> list[EvalSample]:
    (log,) = evaluate(tasks, model=model, log_dir="logs", display="none", **options)
    assert log.status == "success" and log.samples is not None
    return log.samples


def vote(model: Model) -> None:
    """The page's task: with its policy, with all choices to their ends, with those that ended early, and in epochs."""
    Path("sums.py").write_text(shown("sums.py"))
    Path("sums.jsonl").write_text(shown("sums.jsonl"))
    few = [[choice.message.text for choice in sample.output.choices] for sample in run("sums.py", model)]
    whole = [
        [choice.message.text for choice in sample.output.choices] for sample in run("sums.py", model, extra_body={})
    ]
    assert [len(texts) for texts in whole] == [16] * 4
    assert sum(map(len, few)) < 64 and all(set(some) <= set(every) for some, every in zip(few, whole, strict=True))

    group = {"stop_when": {"finished": 1}, "keep": "all"}
    reasons = {
        choice.stop_reason
        for sample in run("sums.py", model, extra_body={"group": group})
        for choice in sample.output.choices
    }
    assert reasons >= {"stop", "unknown"}

    samples = run("sums.py", model, extra_body={}, num_choices=1, epochs=8, limit=1)
    assert len(samples) == 8 and len({sample.output.completion for sample in samples}) == 1  # the task has a seed


def main() -> None:
    model = get_model(f"openai-api/motet/{MODEL}", base_url=URL, api_key=KEY)
    task = Task(
        dataset=[Sample(input=QUESTION, target="x")],
        solver=generate(),
        scorer=match(),
        epochs=8,
        config=GenerateConfig(max_tokens=8),
    )
    samples = run(task, model)
    assert len(samples) == 8 and len({sample.output.completion for sample in samples}) > 1
    vote(model)
    asyncio.run(ask(model))


main()
