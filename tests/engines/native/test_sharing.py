"""Groups with equal prompts, or with a common prefix, compute it once, and generate the same tokens as alone."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from motet.engines.native.core import EngineCore
from motet.types import ChoiceStart, GenerateRequest
from tests.engines.native.drive import GroupOutcome, gb_of, group, make_core, prompt_of, run, take_step
from tests.engines.native.pair import CorePair, with_ticket

SLOW, LONG, KERNELS = pytest.mark.slow, pytest.mark.long, pytest.mark.kernels
NUMBERS = [
    pytest.param({"dtype": "bfloat16"}, marks=KERNELS, id="bfloat16"),
    pytest.param({"dtype": "float32", "kernels": "torch"}, id="torch"),
    pytest.param({"dtype": "bfloat16", "quantization": "int8"}, marks=[KERNELS, SLOW], id="int8"),
    pytest.param({"dtype": "float32"}, marks=[KERNELS, SLOW], id="float32"),
]
PROMPT = prompt_of(83, 1)
TOKENS = 12

Tiny = Callable[[str], Path]


def request_for(name: str, prompt: Sequence[int] = PROMPT, *, seed: int = 0, **fields: Any) -> GenerateRequest:
    return group(name, prompt, seed=seed, **{"max_tokens": TOKENS, **fields})


def plain_core(folder: Path, **numbers: Any) -> EngineCore:
    """Returns a core without a prefix cache and without drafts."""
    return make_core(folder, prefix_cache=False, draft_tokens=0, **numbers)


def alone(core: EngineCore, requests: Sequence[GenerateRequest]) -> dict[str, dict[int, list[int]]]:
    """Runs one request after the other, and returns the tokens of each."""
    return {
        request.request_id: run(core, [replace(request, keep_s=0.0)])[request.request_id].tokens for request in requests
    }


def tokens_of(outcomes: dict[str, GroupOutcome]) -> dict[str, dict[int, list[int]]]:
    return {name: outcome.tokens for name, outcome in outcomes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("length", [83, 80, 5])
def test_equal_prompts_that_arrive_together_are_computed_once(numbers: dict[str, Any], length: int, tiny: Tiny) -> None:
    """Each later group computes the last prompt token again, for the logits of its first tokens."""
    prompt = prompt_of(length, 1)
    requests = [request_for(f"g{i}", prompt, seed=10 * i, n=1 + (i == 3)) for i in range(16)]
    core = make_core(tiny("llama"), budget=48, **numbers)
    together = run(core, requests)
    stats = core.stats()
    assert stats.prefill_tokens == length + 15
    assert stats.trunk_tokens_unshared == 17 * (TOKENS - 1) * length
    assert stats.trunk_tokens_read <= (TOKENS + 1) * length
    assert {outcome.prompt.cached_tokens for outcome in together.values() if outcome.prompt} == {0, length - 1}
    assert tokens_of(together) == alone(plain_core(tiny("llama"), **numbers), requests)


@pytest.mark.slow
def test_more_groups_than_can_run_at_once_share_a_prompt_too(tiny: Tiny) -> None:
    """At most four groups run at once, and in each step at most four start to follow or are woken."""
    requests = [request_for(f"g{i}", seed=10 * i, max_tokens=4) for i in range(16)]
    core = make_core(tiny("llama"), budget=48, max_num_seqs=4)
    outcomes = run(core, requests)
    last_block = len(PROMPT) % 8  # a group that is admitted when no other runs finds all blocks except the last
    assert len(PROMPT) + 15 <= core.stats().prefill_tokens <= len(PROMPT) + 15 * last_block
    assert tokens_of(outcomes) == alone(plain_core(tiny("llama")), requests)


@pytest.mark.slow
def test_a_group_joins_a_trunk_and_keeps_it_after_the_first_group_has_left(tiny: Tiny) -> None:
    core = make_core(tiny("llama"))
    requests = [
        request_for("first"),
        request_for("second", seed=5),
        request_for("third", seed=9),
        request_for("other salt", cache_salt="s"),
    ]
    outcomes = {str(request.request_id): GroupOutcome() for request in requests}
    core.submit(requests[0])
    for _ in range(5):
        take_step(core, outcomes)
    core.submit(requests[1])
    take_step(core, outcomes)
    take_step(core, outcomes)
    assert core.stats().prefill_tokens == len(PROMPT) + 1
    assert core.stats().blocks_used == 11 + 1 + 1
    while outcomes["first"].finish == {}:
        take_step(core, outcomes)
    core.submit(requests[2])
    core.submit(requests[3])
    while core.busy:
        take_step(core, outcomes)
    assert core.stats().prefill_tokens == 2 * len(PROMPT) + 2
    assert tokens_of(outcomes) == alone(plain_core(tiny("llama")), requests)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["abort", "stop", "suspend"])
def test_if_the_first_group_leaves_while_it_computes_another_group_takes_over(end: str, tiny: Tiny) -> None:
    core = make_core(tiny("llama"), budget=32)
    requests = [request_for(f"g{i}", seed=10 * i) for i in range(4)]
    outcomes = {str(request.request_id): GroupOutcome() for request in requests}
    for request in requests:
        core.submit(request)
    take_step(core, outcomes)
    assert (core.stats().groups_running, core.stats().groups_waiting) == (1, 3)
    match end:
        case "abort":
            core.abort(requests[0].request_id)
        case "stop":
            core.stop_choice(requests[0].request_id, 0)
        case "suspend":
            core.forget_prefixes(recompute=True)
    core.abort(requests[2].request_id)  # a waiting group leaves as well
    while core.busy:
        take_step(core, outcomes)
    left = requests if end == "suspend" else requests[1:]
    left = [request for request in left if request is not requests[2]]
    assert core.stats().blocks_used == 0
    expected = alone(plain_core(tiny("llama")), left)
    assert {name: outcomes[name].tokens for name in expected} == expected


@pytest.mark.slow
@pytest.mark.parametrize("numbers", NUMBERS)
def test_different_prompts_with_a_common_prefix_compute_it_once(numbers: dict[str, Any], tiny: Tiny) -> None:
    """The first group computes the prefix, and the others do not wait for the rest of its prompt."""
    common = prompt_of(64, 2)
    long = request_for("long", (*common, *prompt_of(150, 3)), seed=1)
    questions = [request_for(f"q{i}", (*common, *prompt_of(9, 4 + i)), seed=20 * i) for i in range(8)]
    core = make_core(tiny("llama"), budget=48, **numbers)
    outcomes = run(core, [long, *questions])
    assert core.stats().prefill_tokens == 64 + 150 + 8 * 9
    assert tokens_of(outcomes) == alone(plain_core(tiny("llama"), **numbers), [long, *questions])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=SLOW)])
def test_torch_reads_a_long_common_prefix_once_for_all_prompts(dtype: str, tiny: Tiny) -> None:
    prefix = prompt_of(520, 2)
    questions = [request_for(f"q{i}", (*prefix, *prompt_of(250, 4 + i)), seed=20 * i, max_tokens=4) for i in range(4)]
    settings: dict[str, Any] = {"kernels": "torch", "dtype": dtype, "max_model_len": 1024, "budget": 4096}
    core = make_core(tiny("llama"), **settings)
    run(core, [request_for("first", (*prefix, 9), max_tokens=1)])
    together = run(core, questions)
    stats = core.stats()
    assert stats.trunk_tokens_unshared - stats.trunk_tokens_read == 3 * 3 * 512, "in each of three decode steps"
    assert tokens_of(together) == alone(plain_core(tiny("llama"), **settings), questions)


@pytest.mark.slow
def test_groups_after_a_follower_can_pass_it(tiny: Tiny) -> None:
    core = make_core(tiny("llama"), budget=24)
    requests = [request_for("first"), request_for("follower", seed=3), request_for("stranger", prompt_of(9, 5), seed=4)]
    outcomes = {str(request.request_id): GroupOutcome() for request in requests}
    for request in requests:
        core.submit(request)
    while not outcomes["stranger"].tokens:
        take_step(core, outcomes)
    assert not outcomes["follower"].tokens
    while core.busy:
        take_step(core, outcomes)


@pytest.mark.slow
@pytest.mark.parametrize(("priority", "computed"), [(0, 83 + 1), (1, 83 + 1), (-1, 83 + 35)])
def test_an_urgent_group_does_not_follow_a_less_urgent_one(priority: int, computed: int, tiny: Tiny) -> None:
    """It is admitted in the second step of the first group, and computes the blocks that are missing then."""
    core = make_core(tiny("llama"), budget=48)
    requests = [request_for("first"), replace(request_for("second", seed=3), priority=priority)]
    outcomes = {str(request.request_id): GroupOutcome() for request in requests}
    core.submit(requests[0])
    take_step(core, outcomes)
    core.submit(requests[1])
    while core.busy:
        take_step(core, outcomes)
    assert core.stats().prefill_tokens == computed
    assert tokens_of(outcomes) == alone(plain_core(tiny("llama")), requests)


@pytest.mark.slow
def test_without_a_prefix_cache_nothing_is_shared(tiny: Tiny) -> None:
    core = make_core(tiny("llama"), prefix_cache=False)
    run(core, [request_for(f"g{i}", seed=i) for i in range(3)])
    assert core.stats().prefill_tokens == 3 * len(PROMPT)


@pytest.mark.slow
def test_after_the_caches_are_emptied_no_group_joins_an_earlier_trunk(tiny: Tiny) -> None:
    core = make_core(tiny("llama"))
    outcomes = {name: GroupOutcome() for name in ("before", "after")}
    core.submit(request_for("before"))
    for _ in range(3):
        take_step(core, outcomes)
    core.forget_prefixes(recompute=False)
    core.submit(request_for("after", seed=4))
    while core.busy:
        take_step(core, outcomes)
    assert core.stats().prefill_tokens == 2 * len(PROMPT)


@pytest.mark.slow
def test_equal_prompts_fetch_one_prefilled_trunk_between_them(tiny: Tiny) -> None:
    """There is one prefill and one transfer. The leases of all other tickets end."""
    pair = CorePair(tiny("llama"))
    requests = [request_for(f"g{i}", seed=10 * i) for i in range(6)]
    for request in requests:
        pair.p.prefill(request)
    tickets = pair.step_p_until(lambda tickets: len(tickets) == len(requests))
    last_block = (len(PROMPT) - 1) % 8
    assert pair.p.stats().prefill_tokens == len(PROMPT) - 1 + 5 * last_block
    pair.submit(*(with_ticket(request, tickets[request.request_id]) for request in requests))
    pair.finish()
    assert pair.d.stats().transfers == 1
    pair.check_empty()
    pair.check_same(*requests)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=LONG) for seed in range(2, 12))])
@pytest.mark.parametrize(
    ("family", "numbers"),
    [
        pytest.param("llama", {"dtype": "bfloat16"}, marks=KERNELS, id="bfloat16"),
        pytest.param("llama", {"dtype": "float32", "kernels": "torch"}, id="torch"),
        pytest.param("gemma2", {"dtype": "bfloat16"}, marks=[KERNELS, SLOW], id="windows and softcap"),
        pytest.param("gemma2", {"dtype": "float32", "kernels": "torch"}, marks=SLOW, id="windows and softcap by torch"),
    ],
)
def test_each_group_generates_the_same_tokens_as_alone_even_with_little_memory(
    seed: int, family: str, numbers: dict[str, Any], tiny: Tiny
) -> None:
    """Prompts are a tree with four levels. Groups arrive, leave and are preempted at random. Some prompts are kept,
    with a small limit for odd seeds."""
    dice = random.Random(seed)
    prompts = [prompt_of(dice.randrange(1, 40), 100 + i) for i in range(2)]
    for _ in range(3):
        prompts += [(*dice.choice(prompts), *prompt_of(dice.randrange(1, 30), dice.randrange(10**6))) for _ in range(3)]
    requests = []
    for i in range(24):
        outputs = [tuple(prompt_of(dice.choice((0, 0, 0, 5)), seed + i + c)) for c in range(dice.choice((1, 1, 2, 4)))]
        starts = [ChoiceStart(c, 31 * i + c, tokens) for c, tokens in enumerate(outputs)]
        few = dice.choice(((), (5, 6, 7)))  # with few allowed tokens an answer repeats itself, and drafts are accepted
        request = request_for(f"g{i}", dice.choice(prompts), starts=starts, allowed_token_ids=few)
        requests.append(replace(request, keep_s=dice.choice((0.0, 0.0, 1000.0))))
    last = request_for("repeats", prompts[0], allowed_token_ids=(5, 6, 7), temperature=0.0)  # runs alone, with drafts
    budget, itemsize = dice.choice((16, 48, 512)), 2 if numbers["dtype"] == "bfloat16" else 4
    keep_gb = gb_of(12, itemsize) if seed % 2 else None
    core = make_core(tiny(family), blocks=34, max_model_len=200, budget=budget, keep_gb=keep_gb, **numbers)
    outcomes = {str(request.request_id): GroupOutcome() for request in requests}
    waiting, gone = list(requests), set[str]()
    while waiting or core.busy:
        for _ in range(min(len(waiting), dice.choice((0, 0, 1, 5)))):
            core.submit(waiting.pop())
        if dice.random() < 0.05:
            leaving = dice.choice(requests).request_id
            gone.add(leaving)
            core.abort(leaving)
        take_step(core, outcomes)
    outcomes |= run(core, [last])
    core.forget_prefixes(recompute=False)
    assert core.stats().blocks_used == 0
    assert core.stats().preemptions > 0 and core.stats().cached_tokens > 0
    assert core.stats().accepted_tokens > 0
    expected = alone(plain_core(tiny(family), **numbers), [*requests, last])
    for name, tokens in expected.items():
        for index, own in outcomes[name].tokens.items():
            assert own == tokens[index][: len(own)], f"choice {index} of {name}"
            assert name in gone or len(own) == len(tokens[index])
