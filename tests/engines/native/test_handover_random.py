"""Random runs: groups with and without tickets, pulls that land, fail, hang and settle late, aborts, full memory.

The checks of both cores hold after every step, every choice that was not aborted generates the same tokens as alone,
and no block is held at the end.
"""

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from motet.ids import RequestId
from motet.transfer.orders import FailureKind
from motet.types import GenerateRequest
from tests.engines.native.drive import group, make_core, prompt_of, run
from tests.engines.native.pair import CorePair

pytestmark = pytest.mark.slow

Tiny = Callable[[str], Path]
Answers = dict[str, dict[int, list[int]]]
COMMON = prompt_of(24, 99)


def requests() -> list[GenerateRequest]:
    """Returns requests, some with a common prefix, that together need more blocks than the engines have."""
    shapes = [(40, 2), (90, 3), (17, 8), (150, 1), (64, 4), (33, 2), (120, 2), (9, 6)]
    return [
        group(f"g{i}", (COMMON if i % 2 else ()) + prompt_of(length, i), n=n, seed=50 * i, max_tokens=12 + 5 * i)
        for i, (length, n) in enumerate(shapes)
    ]


@pytest.fixture(scope="module")
def answers(tiny: Tiny) -> Answers:
    return {name: outcome.tokens for name, outcome in run(make_core(tiny("llama")), requests()).items()}


class RandomRun:
    """One random run over a pair of engines with little memory."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.dice = random.Random(seed)
        self.pair = CorePair(folder, prefill_blocks=70, decode_blocks=66, max_num_batched_tokens=64)
        self.waiting = requests()
        self.dice.shuffle(self.waiting)
        self.aborted: set[str] = set()
        self.hanging: set[int] = set()

    def run(self) -> None:
        for _ in range(5000):
            if not self.waiting and not self.pair.d.busy and not self.hanging:
                return
            self.move()
            self.pair.step_d()
            self.pair.settle_p()
            self.hanging |= self.pair.d_transfers.abandoned & self.pair.d_transfers.orders.keys()
        raise AssertionError("the run does not end")

    def move(self) -> None:
        match self.dice.randrange(8):
            case 0 | 1 if self.waiting:
                self.submit(self.waiting.pop())
            case 2 if self.open_pulls():
                self.pair.d_transfers.land(self.dice.choice(self.open_pulls()))
            case 3 if self.open_pulls():
                self.fail(self.dice.choice(self.open_pulls()))
            case 4 if self.hanging:
                number = self.hanging.pop()
                self.pair.d_transfers.settle(number)
            case 5 if self.dice.random() < 0.1 and self.pair.d.busy:
                self.abort()
            case _:
                pass

    def open_pulls(self) -> list[int]:
        return sorted(self.pair.d_transfers.orders.keys() - self.hanging - self.pair.d_transfers.abandoned)

    def submit(self, request: GenerateRequest) -> None:
        if self.dice.random() < 0.75:
            request = msgspec.structs.replace(request, ticket=self.pair.prefill(request))
        self.pair.submit(request)

    def fail(self, number: int) -> None:
        settled = self.dice.random() < 0.5
        if not settled:
            self.hanging.add(number)
        self.pair.p.release(self.pair.d_transfers.orders[number].ticket)
        self.pair.d_transfers.fail(number, self.dice.choice(list(FailureKind)), settled=settled)

    def abort(self) -> None:
        open_ = [name for name, outcome in self.pair.outcomes.items() if not outcome.finish]
        if open_:
            name = self.dice.choice(open_)
            self.aborted.add(name)
            self.pair.d.abort(RequestId(name))


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 24))])
def test_whatever_happens_to_pulls_choices_generate_the_same_tokens_as_alone(
    seed: int, tiny: Tiny, answers: Answers
) -> None:
    walk = RandomRun(tiny("llama"), seed)
    walk.run()
    for name, answer in answers.items():
        if name not in walk.aborted:
            assert walk.pair.outcomes[name].error is None
            assert walk.pair.outcomes[name].tokens == answer
    walk.pair.check_empty()
