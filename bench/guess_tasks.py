"""The prompts on which guesses are measured: what people sample many answers of, and what repeats itself."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
FORM: dict[str, object] = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 30},
        "last_name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city_of_residence": {"type": "string", "maxLength": 30},
        "membership_status": {"enum": ["active", "suspended", "honorary"]},
        "interests": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 2, "maxItems": 3},
    },
    "required": ["first_name", "last_name", "age", "city_of_residence", "membership_status", "interests"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Task:
    """Prompts of one kind."""

    name: str
    messages: Sequence[str]
    grammar: Grammar | None = None


def tasks(text: str) -> list[Task]:
    """`text`: a long one, to be summed up."""
    dice = random.Random(7)
    sums = [
        f"A shop has {dice.randint(3, 9)} boxes of {dice.randint(11, 29)} pens and {dice.randint(12, 40)} single pens. "
        f"{dice.randint(5, 10)} pens are broken. How many good pens are there? Think step by step."
        for _ in range(4)
    ]
    parts = [text[begin : begin + 3500] for begin in range(0, 4 * 3500, 3500)]
    return [
        Task("chat", CHAT),
        Task("code", CODE),
        Task("arithmetic", sums),
        Task("summary", [f"{part}\n\nSum up the text above, and quote its most important sentence." for part in parts]),
        Task(
            "JSON",
            [f"Fill in the form as JSON for this person: {person}." for person in PEOPLE],
            Grammar(GrammarKind.JSON, json.dumps(FORM)),
        ),
    ]


def long_text(folder: Path) -> str:
    return (folder / "docs" / "architecture.md").read_text(encoding="utf-8")
