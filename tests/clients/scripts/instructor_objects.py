"""instructor: objects by a tool call, by a strict one and by a schema, whole and in pieces."""

from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel
from scene import ASK, KEY, MAX_TOKENS, MODEL, SEED, URL


class Boat(BaseModel):
    """A boat."""

    kind: Literal["sail", "motor"]
    fast: bool


def main() -> None:
    given = {"model": MODEL, "messages": ASK, "seed": SEED, "max_tokens": MAX_TOKENS, "max_retries": 0}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY), mode=mode)
        boat, whole = client.chat.completions.create_with_completion(response_model=Boat, n=2, **given)
        assert isinstance(boat, Boat) and len(whole.choices) == 2
        (*_, last) = client.chat.completions.create_partial(response_model=Boat, **given)
        assert Boat.model_validate(last.model_dump())


main()
