"""lm-eval: log-likelihoods and texts with the server's own tokenizer, and texts over chat, on tasks of two lines."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from scene import MODEL, URL

LINES = [
    {"question": "The sea is", "right": " blue", "choices": [" blue", " a stone"], "gold": 0},
    {"question": "The boat is", "right": " big", "choices": [" big", " a cow"], "gold": 0},
]
STOPS = ["\n\n", "Question:", "Q:", "</s>"]
"""With the tokenizer's end of sequence they are five, one more than OpenAI takes."""
TASK: dict[str, Any] = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(Path("lines.jsonl").resolve())}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
}
CHOICE: dict[str, Any] = TASK | {
    "task": "boats",
    "output_type": "multiple_choice",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "gold",
    "metric_list": [{"metric": "acc"}],
}
TEXT: dict[str, Any] = TASK | {
    "task": "boats_text",
    "output_type": "generate_until",
    "doc_to_target": "{{right}}",
    "generation_kwargs": {"until": STOPS, "max_gen_toks": 8, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}


def run(kind: str, route: str, tasks: str, more: str, *flags: str) -> dict[str, Any]:
    """Returns the results of each task."""
    model = f"model={MODEL},base_url={URL}/{route},num_concurrent=1,max_retries=1{more}"
    command = [str(Path(sys.executable).with_name("lm_eval")), "run", "--model", kind, "--model_args", model]
    files = ["--include_path", "tasks", "--tasks", tasks, "--output_path", kind]
    done = subprocess.run([*command, *files, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (written,) = Path(kind).rglob("results_*.json")
    results: dict[str, Any] = json.loads(written.read_text())["results"]
    return results


def main() -> None:
    Path("lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    Path("tasks").mkdir()
    for task in (CHOICE, TEXT):  # JSON is YAML
        Path("tasks", f"{task['task']}.yaml").write_text(json.dumps(task))
    told = run("local-completions", "completions", "boats,boats_text", ",tokenizer_backend=remote")
    assert told["boats"]["acc,none"] == 1.0
    assert "exact_match,none" in told["boats_text"]
    told = run("local-chat-completions", "chat/completions", "boats_text", "", "--apply_chat_template")
    assert "exact_match,none" in told["boats_text"]


main()
