"""Inspect: a task with three epochs, and n choices of one prompt with log-probabilities, a tool and a schema."""

import asyncio
import json

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, Model, ResponseSchema, get_model
from inspect_ai.scorer import match
from inspect_ai.solver import generate
from inspect_ai.tool import ToolFunction, ToolInfo, ToolParams
from inspect_ai.util import JSONSchema
from scene import BOAT, CITIES, KEY, MAX_TOKENS, MODEL, QUESTION, SEED, URL, is_boat


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


def main() -> None:
    model = get_model(f"openai-api/motet/{MODEL}", base_url=URL, api_key=KEY)
    task = Task(
        dataset=[Sample(input=QUESTION, target="x")],
        solver=generate(),
        scorer=match(),
        epochs=3,
        config=GenerateConfig(max_tokens=8),
    )
    (log,) = evaluate(task, model=model, log_dir="logs", display="none")
    assert log.status == "success" and log.samples is not None and len(log.samples) == 3
    asyncio.run(ask(model))


main()
