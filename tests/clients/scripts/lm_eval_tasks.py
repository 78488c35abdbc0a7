"""lm-eval: log-likelihoods and texts with the server's tokenizer, texts over chat, and eight answers of a question."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from scene import MODEL, URL, shown

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


OUTPUT = Path("output")


def run(kind: str, route: str, tasks: str, more: str, *flags: str) -> dict[str, Any]:
    """Returns the results of each task; `OUTPUT` has all files of lm-eval."""
    shutil.rmtree(OUTPUT, ignore_errors=True)
    model = f"model={MODEL},base_url={URL}/{route},max_retries=1{more}"
    command = [str(Path(sys.executable).with_name("lm_eval")), "run", "--model", kind, "--model_args", model]
    files = ["--include_path", ".", "--tasks", tasks, "--output_path", str(OUTPUT), "--log_samples"]
    done = subprocess.run([*command, *files, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = OUTPUT.rglob("results_*.json")
    results: dict[str, Any] = json.loads(file.read_text())["results"]
    return results


def different() -> list[int]:
    """Returns the number of different answers, of eight, to each question of the last run."""
    (file,) = OUTPUT.rglob("samples_sums_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    answers = {sample["doc_id"]: sample["resps"][0] for sample in samples}
    assert all(len(repeats) == 8 for repeats in answers.values())
    return [len(set(repeats)) for repeats in answers.values()]


def ask_once() -> None:
    results = run("local-completions", "completions", "boats,boats_text", ",num_concurrent=1")
    assert results["boats"]["acc,none"] == 1.0
    assert "exact_match,none" in results["boats_text"]
    results = run("local-chat-completions", "chat/completions", "boats_text", "", "--apply_chat_template")
    assert "exact_match,none" in results["boats_text"]


def ask_eight_times() -> None:
    """A request for each repeat, and one request with the prompt eight times; then all with one seed."""
    results = run("local-completions", "completions", "sums", ",num_concurrent=8,max_length=8192")
    assert {"exact_match,first", "exact_match,maj@8"} <= set(results["sums"])
    assert len(different()) == 4 and min(different()) > 1
    run("local-completions", "completions", "sums", "", "--batch_size", "8")
    assert min(different()) > 1
    run("local-chat-completions", "chat/completions", "sums", ",num_concurrent=8", "--apply_chat_template")
    assert min(different()) > 1
    run("local-completions", "completions", "sums", ",num_concurrent=8", "--gen_kwargs", "seed=1234")
    assert different() == [1, 1, 1, 1]


def main() -> None:
    Path("lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    for task in (CHOICE, TEXT):  # JSON is YAML
        Path(f"{task['task']}.yaml").write_text(json.dumps(task))
    for name in ("sums.jsonl", "sums.yaml"):
        Path(name).write_text(shown(name))
    ask_once()
    ask_eight_times()


main()
