"""A step of the engine takes constant work in Python for each scheduled token, whatever n, the number of groups, their
lengths and the queues are. The runner computes nothing, and the sampler has a vocabulary of 16."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from motet.engine_info import EngineInfo
from motet.engines.native.core import CoreOptions, EngineCore
from motet.engines.native.step.inputs import StepInputs
from motet.ids import ModelName, RequestId
from motet.transfer.lease import LeaseTable
from motet.transfer.proof import Proof
from motet.types import GenerateRequest, Role, SamplingParams, choice_starts
from tests.engines.native.work import WatchedList, WatchedTuple, lines, watch
from tests.transfer.worker import granted

pytestmark = pytest.mark.slow

BLOCK_SIZE = 16
VOCAB_SIZE = 16
MAX_LINES = 195
"""Maximum number of lines and calls for a token in a step of 32 tokens, without watched lists. It takes 190 with Python
3.11. CPython 3.11 runs 250 bytecodes in a microsecond."""


class BlankRunner:
    """A runner for which every token is equally likely."""

    device = torch.device("cpu")
    trunk_tokens_saved = 0

    def __init__(self, max_num_seqs: int) -> None:
        self._logits = torch.zeros(-(-max_num_seqs // 4) * 4, VOCAB_SIZE)

    def run(self, inputs: StepInputs) -> torch.Tensor:
        return self._logits[: len(inputs.logit_rows)]

    def verify(self) -> None: ...

    def copy_slots(self, source: list[int], target: list[int]) -> None: ...

    def settle(self) -> None: ...


class Engine:
    """A core whose lines are counted."""

    def __init__(self, *, blocks: int = 20_000, max_num_seqs: int = 512, budget: int = 1024) -> None:
        info = EngineInfo(
            model=ModelName("blank"),
            max_model_len=20_000,
            vocab_size=VOCAB_SIZE,
            block_size=BLOCK_SIZE,
            num_blocks=blocks,
            bytes_per_block=1,
            max_num_seqs=max_num_seqs,
            role=Role.BOTH,
            eos_token_ids=(),
            dtype="float32",
            device="cpu",
            fingerprint="",
        )
        options = CoreOptions(max_num_batched_tokens=budget, prefix_cache=True, cache_answers=False, lease_s=60.0)
        self.core = EngineCore(info, BlankRunner(max_num_seqs), options=options)

    def submit(
        self,
        name: str,
        *,
        n: int = 1,
        prompt: int = 64,
        common: int = 0,
        max_tokens: int = 10_000,
        repetition_penalty: float = 1.0,
    ) -> None:
        """Submits a group. Prompts of groups with different names have their first `common` tokens in common."""
        tokens = WatchedTuple((*range(common), *name.encode(), *range(prompt))[:prompt])
        sampling = SamplingParams(max_tokens=max_tokens, repetition_penalty=repetition_penalty)
        starts = choice_starts(n, seed=0)
        self.core.submit(GenerateRequest(request_id=RequestId(name), prompt=tokens, choices=starts, sampling=sampling))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.core.step()

    def cost(self, *, watched: bool = True) -> int:
        """Takes a step, and returns its number of lines and calls."""
        if watched:
            watch(self.core)
        return lines(self.core.step)

    def cost_of_a_token(self) -> float:
        """Takes a step, and returns its number of lines and calls for each token that was computed."""
        before = self.core.counters.prefill_tokens + self.core.counters.generated_tokens
        cost = self.cost(watched=False)
        return cost / (self.core.counters.prefill_tokens + self.core.counters.generated_tokens - before)

    def decode_cost(self, *, watched: bool = True) -> float:
        """Takes steps in which every tail takes one block, and returns the mean number of lines of a token."""
        before = self.core.counters.generated_tokens
        cost = sum(self.cost(watched=watched) for _ in range(BLOCK_SIZE))
        return cost / (self.core.counters.generated_tokens - before)


def decoding(n: int = 4, *, groups: int = 1, prompt: int = 64, num_tokens: int = 20) -> Engine:
    """Returns an engine with groups that have about `num_tokens` output tokens."""
    engine = Engine()
    for i in range(groups):
        engine.submit(f"g{i}", n=n, prompt=prompt)
    while engine.core.counters.generated_tokens < n * groups:
        engine.steps(1)
    engine.steps(num_tokens)
    return engine


def test_the_larger_its_group_the_less_a_token_costs() -> None:
    costs = [decoding(n).decode_cost() for n in (1, 4, 16, 64, 256)]
    assert costs == sorted(costs, reverse=True)


def test_the_more_groups_there_are_the_less_a_token_costs() -> None:
    costs = [decoding(8, groups=groups).decode_cost() for groups in (1, 8, 32)]
    assert costs == sorted(costs, reverse=True)


def test_a_token_costs_no_more_than_a_thousand_lines() -> None:
    assert decoding(32).decode_cost(watched=False) <= MAX_LINES
    assert decoding(8, groups=4).decode_cost(watched=False) <= MAX_LINES


def test_a_token_costs_the_same_after_any_prompt() -> None:
    assert decoding(prompt=16_000).decode_cost() == pytest.approx(decoding(prompt=64).decode_cost(), rel=0.01)


def test_a_token_costs_the_same_after_any_number_of_output_tokens() -> None:
    assert decoding(num_tokens=1500).decode_cost() == pytest.approx(decoding(num_tokens=20).decode_cost(), rel=0.01)


def test_a_prompt_token_costs_the_same_at_any_position() -> None:
    engine = Engine(budget=512)
    engine.submit("long", prompt=16_000)
    engine.steps(1)
    early = engine.cost()
    engine.steps(25)
    assert engine.cost() == pytest.approx(early, rel=0.01)


@pytest.mark.parametrize("scarce", ["choices", "blocks"])
def test_a_token_costs_the_same_however_many_groups_wait(scarce: str) -> None:
    def cost(waiting: int, prompt: int) -> float:
        n, blocks = (4, 2000) if scarce == "choices" else (1, 30)
        engine = Engine(blocks=blocks, max_num_seqs=4)
        engine.submit("first", n=n, prompt=300)
        engine.steps(1)
        for i in range(waiting):
            engine.submit(f"w{i}", prompt=prompt)
        engine.steps(3)
        assert engine.core.stats().groups_waiting == waiting
        return engine.decode_cost()

    assert cost(500, 400) == pytest.approx(cost(1, 200), rel=0.01)


@pytest.mark.parametrize("common", [196, 200], ids=["common prefix", "one prompt"])
def test_a_token_costs_the_same_for_any_number_of_groups_that_wait_for_a_trunk(common: int) -> None:
    """This includes the steps in which they start to follow it, and in which they continue."""

    def cost(waiting: int) -> float:
        engine = Engine(max_num_seqs=32, budget=80)
        for i in range(waiting):
            engine.submit(f"{i:04}", prompt=200, common=common)
        watch(engine.core)
        return max(engine.cost_of_a_token() for _ in range(8))

    few = cost(64)
    assert cost(512) == pytest.approx(few, rel=0.1)
    assert cost(4096) == pytest.approx(few, rel=0.1)


@pytest.mark.parametrize("repetition_penalty", [1.0, 1.1])
def test_another_choice_of_a_request_costs_the_same_after_any_prompt(repetition_penalty: float) -> None:
    def cost(prompt: int) -> int:
        one, many = (
            lines(partial(Engine().submit, "g", n=n, prompt=prompt, repetition_penalty=repetition_penalty))
            for n in (1, 65)
        )
        return many - one

    assert cost(16_000) == pytest.approx(cost(64), rel=0.01)


def test_choices_that_end_together_cost_the_same_each() -> None:
    def cost(n: int) -> float:
        engine = Engine()
        engine.submit("g", n=n, max_tokens=20)
        engine.steps(19)
        cost = engine.cost()
        assert not engine.core.busy
        return cost / n

    assert cost(256) <= cost(32)


def test_choices_that_are_stopped_cost_the_same_each() -> None:
    def cost(n: int) -> float:
        engine = decoding(n)
        order = [i * 7 % n for i in range(n)]
        watch(engine.core)
        total = sum(lines(partial(engine.core.stop_choice, RequestId("g0"), i)) for i in order)
        assert not engine.core.busy
        return total / n

    assert cost(256) <= 1.2 * cost(32)  # the place of a choice among its siblings is found by halving


def test_choices_that_take_blocks_from_each_other_cost_the_same_each() -> None:
    def cost(n: int) -> float:
        engine = Engine(blocks=4 + n)
        engine.submit("g", n=n, prompt=64)
        engine.steps(1 + BLOCK_SIZE)  # every choice has filled its block, and no other is free
        cost = engine.cost()
        assert engine.core.counters.preemptions == n // 2
        return cost / n

    assert cost(256) <= 1.1 * cost(32)  # the youngest sibling that holds a block is found by halving


def test_a_step_costs_the_same_however_many_leases_are_held() -> None:
    def cost(leases: int) -> int:
        proof = Proof(10)
        table = LeaseTable(proof, seconds=60.0)
        for _ in range(leases):
            granted(table, proof)
        return lines(lambda: table.expire(1.0)) + lines(table.next_expiry_s)

    assert cost(1000) == cost(1)


PASSES: dict[str, Callable[[WatchedList], object]] = {
    "tuple": tuple,
    "list": list,
    "set": set,
    "sorted": sorted,
    "sum": sum,
    "max": max,
    "star": lambda numbers: [*numbers],
    "plus": lambda numbers: numbers + [],  # noqa: RUF005  this operator is what is tested
    "onto": lambda numbers: [].__iadd__(numbers),
    "slice": lambda numbers: numbers[:],
    "copy": lambda numbers: numbers.copy(),
    "in": lambda numbers: -1 in numbers,
    "equal": lambda numbers: numbers == [],
    "remove": lambda numbers: numbers.remove(999),
    "reversed": lambda numbers: list(reversed(numbers)),
    "sort": lambda numbers: numbers.sort(),
    "zip": lambda numbers: list(zip(numbers, numbers, strict=True)),
}


@pytest.mark.parametrize("what", PASSES)
def test_a_pass_over_a_watched_list_is_counted_even_if_c_makes_it(what: str) -> None:
    short, long = WatchedList(range(1000 - 10, 1000)), WatchedList(range(1000))
    extra = lines(lambda: PASSES[what](long)) - lines(lambda: PASSES[what](short))
    assert extra >= 990 * 3
