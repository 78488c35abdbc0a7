"""The requests of all client scripts in Python, and the server's address. Needs only the standard library.

Every value has few possible texts, so an answer of a small model is complete before `MAX_TOKENS`. Scripts set a seed,
or temperature 0 if a client has no seed, so that runs are reproducible.
"""

import json
import sys
from pathlib import Path
from typing import Any

URL = f"{sys.argv[1]}/v1"
MODEL = sys.argv[2] if len(sys.argv) > 2 else "smollm2"
KEY = "none"
SEED = 7
MAX_TOKENS = 300
QUESTION = "Name a boat."
ASK: list[Any] = [{"role": "user", "content": QUESTION}]
CITIES = ("Paris", "Rome")
KINDS = ("sail", "motor")

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": list(CITIES)}},
            "required": ["city"],
        },
    },
}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}
BOAT: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"type": "string", "enum": list(KINDS)}, "fast": {"type": "boolean"}},
    "required": ["kind", "fast"],
}
BOAT_FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "boat", "schema": BOAT}}


def is_boat(text: str | None) -> bool:
    """Returns True if the text follows the schema `BOAT`."""
    told = json.loads(text or "")
    return set(told) == {"kind", "fast"} and told["kind"] in KINDS and isinstance(told["fast"], bool)


def is_weather(name: str | None, arguments: str | None) -> bool:
    """Returns True for a call of `get_weather` with one of its cities."""
    return name == "get_weather" and json.loads(arguments or "")["city"] in CITIES


def shown(name: str) -> str:
    """Returns the file that docs/evaluation.md shows under this name, so that the page shows tested code."""
    page = Path(__file__).parents[3].joinpath("docs", "evaluation.md").read_text()
    return page.partition(f"`{name}`:\n\n")[2].partition("```")[2].partition("\n")[2].partition("```")[0]
