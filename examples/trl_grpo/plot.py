"""Plots the running mean of the rewards, with one line per seed, and prints the figures as a table.

python plot.py rewards.png seed1.jsonl seed2.jsonl seed3.jsonl
"""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

WINDOW = 5
"""Number of steps in a running mean."""


def smooth(values: list[float]) -> list[float]:
    """Returns the mean of each value and the WINDOW - 1 before it."""
    windows = (values[max(0, end - WINDOW) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def plot(runs: list[list[dict[str, Any]]], path: Path) -> None:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for run in runs:
        axes.plot(
            [line["step"] for line in run], smooth([line["reward"] for line in run]), label=f"seed {run[0]['seed']}"
        )
    axes.set(xlabel="step", ylabel=f"reward, mean of {WINDOW} steps", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=90)


def table(runs: list[list[dict[str, Any]]]) -> str:
    """Returns a table with one row per run: the first and the last ten steps, and how long each part took."""
    rows = ["| seed | reward, first 10 steps | last 10 steps | tokens per answer | rollouts s | push s | step s |"]
    rows.append("|---|---|---|---|---|---|---|")
    for run in runs:
        first, last = run[:10], run[-10:]
        rewards = [f"{mean([line['reward'] for line in part]):.2f}" for part in (first, last)]
        tokens = " to ".join(f"{mean([line['tokens'] for line in part]):.0f}" for part in (first, last))
        seconds = [f"{mean([line[name] for line in run]):.2f}" for name in ("rollout_s", "push_s", "step_s")]
        rows.append("| " + " | ".join([str(run[0]["seed"]), *rewards, tokens, *seconds]) + " |")
    return "\n".join(rows)


def main() -> None:
    picture, *files = map(Path, sys.argv[1:])
    runs = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    plot(runs, picture)
    print(table(runs))


if __name__ == "__main__":
    main()
