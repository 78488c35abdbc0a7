"""bench.offline runs with the tiny model, and each mode generates all tokens."""

import json
from pathlib import Path

import pytest

from bench.offline.__main__ import main

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("all_forked")
def test_each_mode_generates_all_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--prompts", "5", "--n", "2", "--prompt-tokens", "30", "--max-tokens", "8", "--kv-cache-gb", "0.05"]
    assert main(["--model", str(folder), *small, "--modes", "engine,llm,http"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    numbers = {record[mode][0]["num_tokens"] for mode in ("engine", "llm", "http")}
    assert len(numbers) == 1 and numbers.pop() > 0
