"""The cost of a step's work, and the limit that keeps steps short while several clients are present.

cost           an estimate for rows and prompt tokens, in milliseconds of the machine on which the constants were
               measured. Only their ratios matter, which differ less between machines than the times
StepTiming     learns from the duration of steps how long a step without rows and one unit of cost take on this machine
limit          the cost of a step that takes CONTENDED_RATIO times as long as a step without rows
"""

import math

from motet.engines.native.step.sequence import ChoiceSequence

STEP_COST = 8.0
"""Cost of a step without rows: every weight is read once. All costs are from docs/log.md (135M parameters, two
cores)."""
ROW_COST = 0.5
TRUNK_TOKEN_COST = 0.0029
"""Cost of reading one position of a trunk, once for all rows that share it."""
TAIL_TOKEN_COST = 0.00075
FIRST_TOKEN_COST = 0.2
"""Cost of sampling the first token of a choice."""
PROMPT_TOKEN_COST = 0.32
PROMPT_PAIR_COST = 0.00016
"""Additional cost of a prompt token for each position before it."""
SCORED_TOKEN_COST = 0.06
"""Additional cost of a prompt token whose log-probability is computed."""
CONTENDED_RATIO = 4.0
"""Maximum duration of a step in multiples of a step without rows, while several clients are present."""
ALONE_RATIO = 60.0
"""Maximum duration while one client is present, if the engine has had several: the next request of another client waits
for at most one such step."""
BACKGROUND_PART = 0.25
"""Maximum time that batches add to a step with rows of other clients, relative to the rest of the step."""
GRAMMAR_PART = 0.5
"""Maximum time of expensive grammars, relative to the time of all other work."""
CHEAP_S = 0.0002
"""Maximum time of a cheap grammar for one token, in seconds: its rows run in every step. Most grammars take a tenth of
it."""
SLOWER_RATE, FASTER_RATE = 0.1, 0.5
"""Learning rates for steps that took longer and less time than expected. The first rate is small, because other
programs on the machine make steps longer, but never shorter."""
MAX_CHANGE = 2.0
"""Maximum ratio of a measured time to the expected one, in both directions. Larger ratios are clipped."""


def row_cost(sequence: ChoiceSequence) -> float:
    """Returns the cost of one row of a sequence, without its trunk."""
    return ROW_COST + TAIL_TOKEN_COST * len(sequence.output_tokens)


def trunk_cost(num_tokens: int) -> float:
    """Returns the cost of reading a trunk for all rows that share it."""
    return TRUNK_TOKEN_COST * num_tokens


def prompt_cost(begin: int, end: int) -> float:
    """Returns the cost of computing the tokens at positions [begin, end)."""
    count = end - begin
    return count * (PROMPT_TOKEN_COST + PROMPT_PAIR_COST * (begin + count / 2))


def prompt_tokens_within(cost: float, begin: int) -> int:
    """Returns the number of tokens from position `begin` on that can be computed for this cost."""
    if cost <= 0 or cost == math.inf:
        return 2**62 if cost > 0 else 0
    per_token = PROMPT_TOKEN_COST + PROMPT_PAIR_COST * begin
    # the root of PROMPT_PAIR_COST / 2 x count^2 + per_token x count = cost
    return int((((per_token**2 + 2 * PROMPT_PAIR_COST * cost) ** 0.5) - per_token) / PROMPT_PAIR_COST)


class GrammarTimeLimit:
    """Limits the time that expensive grammars take from all other work of the engine.

    A grammar is expensive if its next token is expected to take more than `CHEAP_S`. Its row runs only while there is
    no deficit, and adds the expected time to the deficit. Each step reduces the deficit by half of the time of its
    other work. So these grammars take at most a third of the time, and other rows take 1.5 times as long."""

    def __init__(self) -> None:
        self._deficit_s = 0.0
        self._step_s = 0.0
        """Time of expensive grammars in this step."""
        self._postpones = False
        """True if a row does not run in this step."""

    def admitted(self, sequences: list[ChoiceSequence], *, is_all_work: bool) -> list[ChoiceSequence]:
        """Returns the sequences that can run in this step. All can run if they all have expensive grammars and the
        engine has no other work (`is_all_work`)."""
        times_s = [0.0 if (matcher := each.sampling.matcher) is None else matcher.expected_s for each in sequences]
        num_expensive = sum(time_s > CHEAP_S for time_s in times_s)
        if not num_expensive or (is_all_work and num_expensive == len(sequences)):
            return sequences
        return [each for each, time_s in zip(sequences, times_s, strict=True) if self._admits(time_s)]

    def _admits(self, time_s: float) -> bool:
        if time_s <= CHEAP_S:
            return True
        if self._deficit_s > 0:
            self._postpones = True
            return False
        self._deficit_s += time_s
        self._step_s += time_s
        return True

    def clear_deficit(self) -> bool:
        """Called if there is nothing else to run. Returns True if a row was postponed, which can then run."""
        postponed, self._postpones = self._postpones, False
        self._deficit_s = min(self._deficit_s, 0.0)
        return postponed

    def record(self, step_s: float) -> None:
        """Called after each step, with its duration."""
        self._deficit_s = max(self._deficit_s, 0.0) - GRAMMAR_PART * max(step_s - self._step_s, 0.0)
        self._step_s = 0.0
        self._postpones = False


class StepTiming:
    """The measured time of a step without rows, and of one unit of cost, on this machine."""

    def __init__(self) -> None:
        self.step_s = 0.001 * STEP_COST
        self.unit_s = 0.001
        self._num_small = self._num_large = 0
        self.grammars = GrammarTimeLimit()

    def limit(self, *, contended: bool) -> float:
        """Returns the maximum cost of a step's work."""
        ratio = CONTENDED_RATIO if contended else ALONE_RATIO
        return (ratio - 1) * self.step_s / self.unit_s

    def background_limit(self, cost: float) -> float:
        """Returns the maximum cost of a step, including batches. `cost`: its cost without batches."""
        return cost + BACKGROUND_PART * (self.step_s / self.unit_s + cost)

    def record(self, cost: float, seconds: float) -> None:
        """Learns from a step: from a small step the time of a step without rows, and from a large one the time of a
        unit of cost."""
        if seconds <= 0:
            return
        self.grammars.record(seconds)
        if cost * self.unit_s < self.step_s:
            self._num_small += 1
            self.step_s = _towards(self.step_s, seconds - cost * self.unit_s, count=self._num_small)
            if not self._num_large:
                self.unit_s = self.step_s / STEP_COST
        else:
            self._num_large += 1
            self.unit_s = _towards(self.unit_s, (seconds - self.step_s) / cost, count=self._num_large)


def _towards(expected: float, measured: float, *, count: int) -> float:
    """Returns a new expected value between the old one and the measured one, which is clipped by `MAX_CHANGE`. `count`:
    number of measured values, including this one; the first ones have a higher weight."""
    rate = max(SLOWER_RATE, 1 / count) if measured > expected else FASTER_RATE
    return expected + rate * (min(max(measured, expected / MAX_CHANGE), expected * MAX_CHANGE) - expected)
