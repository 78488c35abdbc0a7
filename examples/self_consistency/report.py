"""Reports what each policy saves and how accurate it is: figures with confidence intervals, a table, and a plot.

The plot needs matplotlib. To report on saved answers: python -m examples.self_consistency.report runs.json savings.svg
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

Z = 1.959964
"""Number of standard deviations on each side of the mean that contain 95 % of a normal distribution."""


@dataclass(frozen=True)
class Answer:
    """Result of the vote on one question."""

    kind: str
    right: bool
    started: int
    """Number of samples that started."""
    finished: int
    """Number of samples that finished. They vote if they have a value."""
    tokens: int
    """Number of output tokens of all samples, including those that were ended early."""


@dataclass(frozen=True)
class Run:
    """Results of all questions under one policy."""

    policy: str
    at_a_time: int
    seconds: float
    answers: Sequence[Answer]
    """One answer per question, in the same order in all runs."""

    @property
    def right(self) -> int:
        return sum(answer.right for answer in self.answers)

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)


def wilson(right: int, total: int) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a proportion. It stays between 0 and 1 and suits small samples."""
    share, square = right / total, Z * Z
    middle = share + square / (2 * total)
    reach = Z * math.sqrt(share * (1 - share) / total + square / (4 * total * total))
    low, high = (middle - reach) / (1 + square / total), (middle + reach) / (1 + square / total)
    return min(low, share), max(high, share)  # rounding can put a share of 0 or 1 outside the interval


def difference(run: Run, full: Run) -> tuple[float, float, float]:
    """Returns the difference in accuracy between `run` and `full`, and its 95 % interval, for the same questions.

    The interval follows Bonett and Price (2012). It adds one question that only `run` got right and one that only
    `full` got right, so it has a width even if both were right about the same questions.
    """
    pairs = [(one.right, other.right) for one, other in zip(run.answers, full.answers, strict=True)]
    won, lost, total = pairs.count((True, False)), pairs.count((False, True)), len(pairs) + 2
    middle = (won - lost) / total
    reach = Z * math.sqrt(((won + lost + 2) / total - middle * middle) / total)
    return (won - lost) / len(pairs), middle - reach, middle + reach


def table(runs: Sequence[Run]) -> str:
    """Returns a Markdown table with one row per run. The first run of each concurrency is the full vote."""
    heads = ["policy", "at a time", "right", "difference to all", "samples", "tokens per question", "saved"]
    rows = ["| " + " | ".join([*heads, "seconds", "saved"]) + " |", "|---" * 9 + "|"]
    for run in runs:
        full = next(one for one in runs if one.at_a_time == run.at_a_time)
        rows.append("| " + " | ".join(cells(run, full)) + " |")
    return "\n".join(rows)


def cells(run: Run, full: Run) -> list[str]:
    total = len(run.answers)
    low, high = wilson(run.right, total)
    mean, less, more = difference(run, full)
    return [
        run.policy,
        str(run.at_a_time),
        f"{run.right / total:.1%} ({low:.1%} to {high:.1%})",
        "" if run is full else f"{100 * mean:+.1f} ({100 * less:+.1f} to {100 * more:+.1f}) points",
        f"{fmean(answer.started for answer in run.answers):.1f}",
        f"{run.tokens / total:.0f}",
        "" if run is full else f"{1 - run.tokens / full.tokens:.0%}",
        f"{run.seconds:.1f}",
        "" if run is full else f"{1 - run.seconds / full.seconds:.0%}",
    ]


def plot(runs: Sequence[Run], path: Path) -> None:
    """Plots accuracy over tokens with intervals, and next to it the remaining shares of tokens and seconds."""
    from matplotlib.figure import Figure  # imported here, since only the plot needs it

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    votes, costs = figure.subplots(1, 2)
    loads = sorted({run.at_a_time for run in runs})
    policies = [run for run in runs if run.at_a_time == loads[0]]
    for run in policies:
        total = len(run.answers)
        share, (low, high) = run.right / total, wilson(run.right, total)
        votes.errorbar(run.tokens / total, share, [[share - low], [high - share]], fmt="o", capsize=3, label=run.policy)
    votes.set(xlabel="tokens per question", ylabel="right votes, 95 % interval", ylim=(0, 1))
    votes.set_xlim(left=0)
    votes.grid(alpha=0.3)
    votes.legend(fontsize="small", loc="lower right")
    bars = {"tokens": [run.tokens / policies[0].tokens for run in policies]}
    for load in loads:
        same = [run for run in runs if run.at_a_time == load]
        bars[f"seconds, {load} at a time"] = [run.seconds / same[0].seconds for run in same]
    for number, (name, shares) in enumerate(bars.items()):
        costs.barh([place + (number - 1) * 0.25 for place in range(len(policies))], shares, 0.25, label=name)
    costs.set_yticks(range(len(policies)), [run.policy for run in policies])
    costs.invert_yaxis()
    costs.set(xlabel="share of what all samples take")
    costs.grid(alpha=0.3, axis="x")
    costs.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    figure.savefig(path, dpi=90)


def save(runs: Sequence[Run], path: Path) -> None:
    path.write_text(json.dumps([asdict(run) for run in runs]))


def load(path: Path) -> list[Run]:
    runs = json.loads(path.read_text())
    return [Run(**run | {"answers": [Answer(**answer) for answer in run["answers"]]}) for run in runs]


if __name__ == "__main__":
    runs = load(Path(sys.argv[1]))
    plot(runs, Path(sys.argv[2]))
    print(table(runs))
