"""Outlines: n answers held to a type, to choices, to a regular expression and to a grammar, and a stream."""

import json
import re
from typing import Literal

import outlines
from openai import OpenAI
from outlines.types import CFG, Regex
from pydantic import BaseModel
from scene import KEY, MAX_TOKENS, MODEL, QUESTION, SEED, URL

GRAMMAR = 'start: "ahoy" ("!" | "?")'


class Boat(BaseModel):
    kind: Literal["sail", "motor"]
    fast: bool


def main() -> None:
    model = outlines.from_vllm(OpenAI(base_url=URL, api_key=KEY), MODEL)
    given = {"max_tokens": MAX_TOKENS, "seed": SEED}
    several = model(QUESTION, n=3, **(given | {"max_tokens": 8}))
    assert len(several) == 3
    assert "".join(model.stream(QUESTION, **(given | {"max_tokens": 8}))) == several[0]

    boats = model(QUESTION, Boat, n=3, **given)
    assert len(boats) == 3 and all(Boat.model_validate_json(boat) for boat in boats)
    assert json.loads("".join(model.stream(QUESTION, Boat, **given)))["kind"] in ("sail", "motor")
    assert set(model(QUESTION, Literal["red", "green"], n=3, **given)) <= {"red", "green"}
    assert all(re.fullmatch("[a-c]{3}", text) for text in model(QUESTION, Regex("[a-c]{3}"), n=3, **given))
    assert set(model(QUESTION, CFG(GRAMMAR), n=3, **given)) <= {"ahoy!", "ahoy?"}

    plain = outlines.from_openai(OpenAI(base_url=URL, api_key=KEY), MODEL)
    assert Boat.model_validate_json(plain(QUESTION, Boat, **given))


main()
