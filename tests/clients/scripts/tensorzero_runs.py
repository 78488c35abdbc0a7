"""TensorZero's embedded gateway: a chat whole and streamed, a named tool, and a function that returns JSON."""

import json
from pathlib import Path

from scene import BOAT, MAX_TOKENS, MODEL, QUESTION, SEED, URL, WEATHER, is_boat, is_weather
from tensorzero import TensorZeroGateway

CONFIG = f"""\
[models.motet]
routing = ["motet"]
[models.motet.providers.motet]
type = "openai"
api_base = "{URL}/"
model_name = "{MODEL}"
api_key_location = "none"
[functions.boat]
type = "json"
output_schema = "boat.json"
[functions.boat.variants.motet]
type = "chat_completion"
model = "motet"
json_mode = "strict"
"""


def main() -> None:
    Path("boat.json").write_text(json.dumps(BOAT))
    Path("tensorzero.toml").write_text(CONFIG)
    ask = {"messages": [{"role": "user", "content": QUESTION}]}
    few, many = ({"chat_completion": {"max_tokens": most, "seed": SEED}} for most in (8, MAX_TOKENS))
    with TensorZeroGateway.build_embedded(config_file="tensorzero.toml") as gateway:
        whole = gateway.inference(model_name="motet", input=ask, params=few)
        assert whole.usage.output_tokens > 0
        chunks = list(gateway.inference(model_name="motet", input=ask, params=few, stream=True))
        pieces = [block.text for chunk in chunks for block in chunk.content]
        assert "".join(pieces) == whole.content[0].text

        tool = WEATHER["function"] | {"strict": False}
        choice = {"specific": "get_weather"}
        called = gateway.inference(
            model_name="motet", input=ask, params=many, additional_tools=[tool], tool_choice=choice
        )
        (call,) = called.content
        assert is_weather(call.name, json.dumps(call.arguments))

        formed = gateway.inference(function_name="boat", input=ask, params=many)
        assert is_boat(formed.output.raw)


main()
