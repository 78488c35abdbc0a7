"""lm-eval: multiple choice after five examples and a text in windows, one request at a time and several at a time.

Saves the results, and the log-likelihood of each option, as `runs.json`, so that two servers can be compared. The
third argument is the number of ways. The fourth is the example that adds the model `motet` to lm-eval, which is then
used.
"""

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from scene import MODEL, URL

WAYS = int(sys.argv[3])
KIND = "motet" if len(sys.argv) > 4 else "local-completions"
SUMS = [(first, second) for first in range(2, 8) for second in (5, 8)]
TASKS: dict[str, dict[str, Any]] = {
    "sums_choice": {
        "dataset_kwargs": {"data_files": {"test": str(Path("choices.jsonl").resolve())}},
        "output_type": "multiple_choice",
        "fewshot_split": "test",
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": 5,
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "licence_text": {
        "dataset_kwargs": {"data_files": {"test": str(Path("text.jsonl").resolve())}},
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "several": {"num_concurrent": 8, "batch_size": 4},
    "one at a time": {"num_concurrent": 1, "batch_size": 1},
}


def question(first: int, second: int) -> dict[str, Any]:
    """Returns a question with four options of different lengths. The place of the right option varies."""
    right = first + second
    options = [f" The sum is {right + step}." if step % 2 else f" {right + step}" for step in range(-1, 3)]
    gold = (first * second) % 4
    options[1], options[gold] = options[gold], options[1]
    return {"question": f"What is {first} plus {second}?", "choices": options, "gold": gold}


def save_files() -> None:
    lines = [json.dumps(question(*pair)) for pair in SUMS]
    Path("choices.jsonl").write_text("\n".join(lines) + "\n")
    text = Path(__file__).parents[3].joinpath("LICENSE").read_text()[:3000]
    Path("text.jsonl").write_text(json.dumps({"text": text}) + "\n")
    for name, task in TASKS.items():  # JSON is YAML
        common = {"task": name, "dataset_path": "json", "test_split": "test"}
        Path(f"{name}.yaml").write_text(json.dumps(common | task))


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the results of all tasks, and the log-likelihoods of all samples."""
    model = {"model": MODEL, "base_url": f"{URL}/completions", "max_retries": 1, "max_length": 512, **settings}
    started_s = time.perf_counter()
    found = simple_evaluate(KIND, model_args=model, tasks=[*TASKS], task_manager=TaskManager(include_path="."))
    seconds = time.perf_counter() - started_s
    results = {
        task: {name: value for name, value in values.items() if isinstance(value, float)}
        for task, values in found["results"].items()
    }
    samples = {
        task: [[response[0] for response in sample["resps"]] for sample in sorted(rows, key=lambda row: row["doc_id"])]
        for task, rows in found["samples"].items()
    }
    return {"results": results, "samples": samples, "seconds": seconds}


def main() -> None:
    save_files()
    if KIND == "motet":
        runpy.run_path(sys.argv[4])
    runs = {name: run(settings) for name, settings in [*SETTINGS.items()][:WAYS]}
    first, *others = runs.values()
    assert len(first["samples"]["sums_choice"]) == len(SUMS)
    assert all(other["samples"] == first["samples"] for other in others)
    Path("runs.json").write_text(json.dumps(runs))


main()
