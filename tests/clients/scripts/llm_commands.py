"""The `llm` command: a prompt, schemas, a tool and a completion, with models named in its YAML file."""

import json
import subprocess
import sys
from pathlib import Path

from scene import BOAT, KEY, MAX_TOKENS, MODEL, QUESTION, URL, is_boat

MODELS = f"""\
- model_id: motet
  model_name: {MODEL}
  api_base: {URL}
  supports_schema: true
  supports_tools: true
- model_id: motet-text
  model_name: {MODEL}
  api_base: {URL}
  completion: true
"""
TOOL = 'def get_weather(city: str) -> str:\n    "Returns the weather of a city."\n    return "rain"\n'


def llm(*arguments: str, most: int = MAX_TOKENS) -> str:
    command = [str(Path(sys.executable).with_name("llm")), "--key", KEY, "-o", "max_tokens", str(most), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def main() -> None:
    folder = Path.home() / ".config" / "io.datasette.llm"
    folder.mkdir(parents=True)
    (folder / "extra-openai-models.yaml").write_text(MODELS)
    given = ("-m", "motet", "-o", "seed", "7", QUESTION)
    assert llm(*given, most=8) == llm(*given, "--no-stream", most=8)
    assert is_boat(llm(*given, "--schema", json.dumps(BOAT)))
    assert is_boat(llm(*given, "--schema", json.dumps(BOAT), "--no-stream"))
    numbers = json.loads(llm(*given, "--schema", "fast bool, old bool"))
    assert set(numbers) == {"fast", "old"}
    llm(*given, "--functions", TOOL, most=8)
    assert llm("-m", "motet-text", "A boat", most=4)


main()
