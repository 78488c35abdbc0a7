"""Prompts for the measurement of draft tokens: tasks for which users sample many answers, and texts that repeat."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from motet.errors import EngineError
from motet.text.formats import ModelFormats
from motet.text.template import ChatTemplate
from motet.text.tokenizer import Tokenizer
from motet.text.tools.tool_format import Tool, ToolMode, ToolRules
from motet.types import Grammar, GrammarKind

CHAT = (
    "Why is the sky blue? Explain it to a child.",
    "Suggest three names for a cafe by the sea, and say why each one fits.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What should I look at before I buy a used bicycle?",
)
CODE = (
    "Write a Python function that returns the n-th Fibonacci number, with a docstring and two tests.",
    "Write a Python class for a stack with push, pop and peek, and show how to use it.",
    "Here is a function:\n\ndef area(width, height):\n    return width * height\n\nWrite it again with checks that "
    "both are positive, and a function perimeter(width, height) with the same checks.",
    "Write a SQL table for books and a query that counts the books of each author.",
)
PEOPLE = ("Ada Byron, 36, London", "Max Born, 51, Berlin", "Rosa Lund, 28, Oslo", "Juan Vega, 44, Lima")


def closed(properties: Mapping[str, object]) -> dict[str, object]:
    """Returns the schema of an object that has exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


FORM = closed(
    {
        "first_name": {"type": "string", "maxLength": 30},
        "last_name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city_of_residence": {"type": "string", "maxLength": 30},
        "membership_status": {"enum": ["active", "suspended", "honorary"]},
        "interests": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 2, "maxItems": 3},
    }
)
ERRANDS = (
    "What will the weather be like in Oslo over the next three days, in Celsius?",
    "Book a table for four at the restaurant Lindenhof on Friday evening, outside if possible.",
    "Please remind Rosa Lund that the report is due tomorrow. It is urgent.",
    "Is it going to rain in San Francisco tomorrow? I think in Fahrenheit.",
)
TOOLS = {
    "get_weather_forecast": closed(
        {
            "city": {"type": "string", "maxLength": 30},
            "number_of_days": {"type": "integer", "minimum": 1, "maximum": 14},
            "temperature_unit": {"enum": ["celsius", "fahrenheit"]},
        }
    ),
    "book_restaurant_table": closed(
        {
            "restaurant": {"type": "string", "maxLength": 30},
            "number_of_guests": {"type": "integer", "minimum": 1, "maximum": 12},
            "day_of_week": {"enum": ["thursday", "friday", "saturday", "sunday"]},
            "seat_outside": {"type": "boolean"},
        }
    ),
    "send_message": closed(
        {
            "recipient": {"type": "string", "maxLength": 30},
            "message_text": {"type": "string", "maxLength": 120},
            "is_urgent": {"type": "boolean"},
        }
    ),
}
"""Parameters by function."""


@dataclass(frozen=True)
class PromptTask:
    """Prompts of one kind."""

    name: str
    messages: Sequence[str]
    grammar: Grammar | None = None
    functions: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Parameters by function, for the functions that the prompts describe."""

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        template = ChatTemplate.of(tokenizer)
        tools = [
            {"type": "function", "function": {"name": name, "parameters": parameters}}
            for name, parameters in self.functions.items()
        ]
        texts = [template.render([{"role": "user", "content": message}], tools=tools).text for message in self.messages]
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def one_call(functions: Mapping[str, Mapping[str, object]], tokenizer: Tokenizer) -> Grammar:
    """Returns the grammar that the server builds for `tool_choice: required` without parallel calls."""
    tool_format = ModelFormats.of(tokenizer, tokenizer.chat_template).tools
    if tool_format is None:
        raise EngineError("the format of the model's tool calls is unknown")
    tools = tuple(Tool(name=name, parameters=schema, strict=False) for name, schema in functions.items())
    rules = ToolRules(callable=tools, mode=ToolMode.REQUIRED, parallel=False)
    return Grammar(GrammarKind.LARK, tool_format.grammar(rules, tokenizer.special_tokens))


def tasks(text: str, tokenizer: Tokenizer) -> list[PromptTask]:
    """Returns the tasks. `text` is a long text to summarise."""
    dice = random.Random(7)
    sums = [
        f"A shop has {dice.randint(3, 9)} boxes of {dice.randint(11, 29)} pens and {dice.randint(12, 40)} single pens. "
        f"{dice.randint(5, 10)} pens are broken. How many good pens are there? Think step by step."
        for _ in range(4)
    ]
    parts = [text[begin : begin + 3500] for begin in range(0, 4 * 3500, 3500)]
    return [
        PromptTask("chat", CHAT),
        PromptTask("code", CODE),
        PromptTask("arithmetic", sums),
        PromptTask(
            "summary", [f"{part}\n\nSum up the text above, and quote its most important sentence." for part in parts]
        ),
        PromptTask(
            "JSON",
            [f"Fill in the form as JSON for this person: {person}." for person in PEOPLE],
            Grammar(GrammarKind.JSON, json.dumps(FORM)),
        ),
        PromptTask("tool call", ERRANDS, one_call(TOOLS, tokenizer), TOOLS),
    ]


def long_text(repository: Path) -> str:
    """Returns a page of the documentation."""
    return (repository / "docs" / "architecture.md").read_text(encoding="utf-8")
