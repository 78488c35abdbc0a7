"""Rows of `bench.scoring`: the speed of each server, and the agreement of its log-probabilities with Motet's."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from bench.program.report import Bound, Cells, Target
from bench.scoring.cases import DIFFERENT, FEW_SHOT, PERPLEXITY, ScoringRound

MOTET, BEFORE, VLLM, LLAMA = "motet", "before", "vllm", "llama.cpp"
FLOAT32 = "float32"
MIN_SPEEDS = {FEW_SHOT: 10.0, DIFFERENT: 1.2, PERPLEXITY: 1.5}
"""Minimum prompts per second of Motet, relative to vLLM's."""
MAX_DIFFERENCE = 0.001
"""Maximum difference between log-probabilities of two servers in float32, in nats."""


@dataclass(frozen=True)
class Agreement:
    """Log-probabilities of two servers for the same tokens."""

    difference: float | None
    """The largest absolute difference. None if one of the servers reports no log-probabilities."""
    same_best: float | None
    """Share of the questions whose most likely option is the same. None if there are no questions."""


@dataclass(frozen=True)
class ScoringRow:
    server: str
    case: str
    dtype: str
    prompts: int
    total_s: float
    prompts_per_s: float
    computed: int | None
    ratio: float | None
    """Prompts per second divided by vLLM's. None if vLLM was not measured."""
    agreement: Agreement

    def record(self) -> dict[str, object]:
        return asdict(self)

    def cells(self) -> Cells:
        return [
            ("case", self.case, "<"),
            ("dtype", self.dtype, "<"),
            ("server", self.server, "<"),
            ("prompts", self.prompts, ""),
            ("s", self.total_s, ".2f"),
            ("prompts/s", self.prompts_per_s, ".2f"),
            ("/ vLLM's", self.ratio, ".2f"),
            ("computed", self.computed, ""),
            ("difference", self.agreement.difference, ".6f"),
            ("same best", self.agreement.same_best, ".3f"),
        ]


def rows_of(rounds: Mapping[tuple[str, str], Sequence[ScoringRound]], dtype: str) -> list[ScoringRow]:
    """Returns a row for each server and case, with the medians of the rounds and their worst agreement."""
    rows = []
    speeds = {key: median(result.prompts_per_s for result in results) for key, results in rounds.items()}
    for (name, case), results in sorted(rounds.items(), key=lambda item: item[0][1]):
        peer = speeds.get((VLLM, case))
        computed = [result.computed for result in results if result.computed is not None]
        # The rounds of a server that failed in some of them cannot be matched with Motet's.
        own = rounds.get((MOTET, case), [])
        pairs = [agreement(*pair) for pair in zip(own, results, strict=True)] if len(own) == len(results) else []
        rows.append(
            ScoringRow(
                server=name,
                case=case,
                dtype=dtype,
                prompts=results[0].prompts,
                total_s=median(result.total_s for result in results),
                prompts_per_s=speeds[name, case],
                computed=round(median(computed)) if computed else None,
                ratio=speeds[name, case] / peer if peer else None,
                agreement=Agreement(
                    max((one.difference for one in pairs if one.difference is not None), default=None),
                    min((one.same_best for one in pairs if one.same_best is not None), default=None),
                ),
            )
        )
    return rows


def agreement(one: ScoringRound, other: ScoringRound) -> Agreement:
    """Compares the log-probabilities that two servers have returned for the same requests."""
    differences, same = [], []
    for mine, theirs in zip(one.scores, other.scores, strict=True):
        if mine.best is not None:
            same.append(mine.best == theirs.best)
        if not theirs.logprobs:
            continue
        for row, other_row in zip(mine.logprobs, theirs.logprobs, strict=True):
            differences += [abs(a - b) for a, b in zip(row, other_row, strict=True)]
    return Agreement(max(differences, default=None), sum(same) / len(same) if same else None)


def targets(rows: Sequence[ScoringRow]) -> list[Target]:
    """Returns the targets of the measured cases. Only the first dtype has targets of speed."""
    found = []
    timed = rows[0].dtype if rows else FLOAT32
    for row in rows:
        if row.server == MOTET and row.dtype == timed and row.ratio is not None and row.case in MIN_SPEEDS:
            limit = MIN_SPEEDS[row.case]
            found.append(Target(f"{row.case}: prompts/s / vLLM's", row.ratio, limit, Bound.AT_LEAST))
        if row.server == VLLM and row.dtype == FLOAT32:
            worst = row.agreement.difference
            thousandths = None if worst is None else 1000 * worst
            found.append(Target(f"{row.case}: thousandths of a nat in float32", thousandths, 1000 * MAX_DIFFERENCE))
            if row.agreement.same_best is not None:
                found.append(Target(f"{row.case}: same best option", row.agreement.same_best, 1.0, Bound.AT_LEAST))
    return found
