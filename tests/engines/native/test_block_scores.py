"""Prompts with log-probabilities share blocks whose scores are known, and get the same scores as without a cache."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from motet.block_names import BlockName
from motet.engines.native.build import build_parts
from motet.engines.native.core import EngineCore
from motet.engines.native.kv.block_scores import MAX_NEEDS, BlockScores, ScoreNeeds
from motet.engines.native.scheduling.plan_builder import MAX_SCORED_ROWS, SCORES_PER_ROW
from motet.engines.native.step.commit import NO_SCORE
from motet.engines.native.step.inputs import StepInputs
from motet.engines.native.step.run import ModelRunner
from motet.ids import RequestId
from motet.types import GenerateRequest, Score, TokenLogprob
from tests.engines.native.drive import GroupOutcome, gb_of, group, make_core, prompt_of, run, take_step
from tests.engines.native.recorder import WrappedRunner
from tests.tiny_engine import BLOCK_SIZE, engine_config

NUMBERS = [
    pytest.param({"dtype": "float32", "kernels": "torch"}, id="torch"),
    pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.kernels, id="bfloat16"),
    pytest.param({"dtype": "float32"}, marks=[pytest.mark.kernels, pytest.mark.slow], id="float32"),
]
TRUNK = prompt_of(83, 1)
HITS = len(TRUNK) // BLOCK_SIZE

_ENCODER = msgspec.msgpack.Encoder()

Tiny = Callable[[str], Path]


def scored(name: str, prompt: Sequence[int], *, top: int = 1, **fields: Any) -> GenerateRequest:
    return group(name, prompt, prompt_logprobs=top, **{"max_tokens": 2, **fields})


def results_of(outcomes: dict[str, GroupOutcome], requests: Sequence[GenerateRequest]) -> dict[str, Any]:
    """Returns the requested scores of each prompt, and the tokens of its choices."""
    return {
        each.request_id: (scores_of(outcomes[each.request_id], each), outcomes[each.request_id].tokens)
        for each in requests
    }


def scores_of(outcome: GroupOutcome, request: GenerateRequest) -> list[Score] | None:
    """Returns the requested scores of a prompt with as many alternatives as were requested."""
    sampling, report = request.sampling, outcome.prompt
    assert report is not None and (report.logprobs is None) == (sampling.prompt_logprobs is None)
    if report.logprobs is None:
        return None
    scores = [*report.scores_since(request.scored_from)]
    if sampling.prompt_logprob_token_ids:
        return scores
    return [one and replace(one, top=one.top[: sampling.prompt_logprobs]) for one in scores]


def one_by_one(core: EngineCore, requests: Sequence[GenerateRequest]) -> dict[str, Any]:
    """Runs one request after the other, with the scores of all tokens."""
    complete = [replace(each, scored_from=0) for each in requests]
    return {
        name: found
        for each, all_scores in zip(requests, complete, strict=True)
        for name, found in results_of(run(core, [all_scores]), [each]).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("numbers", NUMBERS)
def test_prompts_in_any_order_get_the_scores_of_an_engine_without_a_cache(numbers: dict[str, Any], tiny: Tiny) -> None:
    """There are few blocks, and steps are small: groups follow one another, are suspended, and lose cached blocks."""
    rng = random.Random(3)
    requests = []
    for number in range(24):
        prompt = (*TRUNK[: rng.randrange(20, 84)], *prompt_of(rng.randrange(1, 30), rng.randrange(4)))
        request = scored(f"g{number}", prompt, top=rng.randrange(4), n=rng.choice((1, 1, 3)), seed=number)
        if number % 5 == 0:
            request = replace(request, sampling=replace(request.sampling, prompt_logprobs=None))
        if number % 7 == 1:
            request = replace(request, sampling=replace(request.sampling, prompt_logprob_token_ids=(5, 9)))
        if number % 3 == 0:
            request = replace(request, scored_from=rng.randrange(len(prompt) + 1))
        requests.append(request)
    expected = one_by_one(make_core(tiny("llama"), prefix_cache=False, draft_tokens=0, **numbers), requests)
    core = make_core(tiny("llama"), blocks=40, budget=32, max_model_len=160, **numbers)
    assert results_of(run(core, requests, stagger=2), requests) == expected
    stats = core.stats()
    assert stats.cached_tokens > 0 and stats.prefill_tokens < sum(len(each.prompt) for each in requests)


@pytest.mark.slow
def test_only_tokens_without_known_scores_are_computed(tiny: Tiny) -> None:
    core = make_core(tiny("llama"))

    def computed(request: GenerateRequest) -> int:
        before = core.stats().prefill_tokens
        run(core, [request])
        return core.stats().prefill_tokens - before

    rest = len(TRUNK) - HITS * BLOCK_SIZE
    assert computed(group("plain", TRUNK)) == len(TRUNK)
    assert computed(scored("first", TRUNK, top=2)) == len(TRUNK)  # the blocks have no scores yet
    assert computed(scored("again", TRUNK, top=2)) == rest + 1
    assert computed(scored("fewer", TRUNK, top=0)) == rest + 1
    assert computed(scored("least", TRUNK[::-1], top=0)) == len(TRUNK)
    assert computed(scored("one", TRUNK[::-1], top=1)) == rest + 1
    assert computed(scored("longer", (*TRUNK, 7, 8), top=1)) == rest + 2 + 1
    assert computed(scored("more", TRUNK, top=5)) == len(TRUNK)
    assert computed(scored("named", TRUNK, top=2, prompt_logprob_token_ids=(3,))) == len(TRUNK)
    assert computed(scored("salted", TRUNK, cache_salt="other")) == len(TRUNK)
    later = replace(scored("later", prompt_of(83, 5)), scored_from=HITS * BLOCK_SIZE - 3)
    run(core, [group("unscored", later.prompt)])
    assert computed(later) == rest + BLOCK_SIZE + 1  # no scores of earlier blocks, but the logits of the token before
    assert computed(replace(later, request_id=RequestId("last"), scored_from=len(TRUNK) - 1)) == rest
    assert computed(replace(later, request_id=RequestId("again later"))) == rest + 1
    core.update(replace(core.info, block_weights="new"), lambda: None)
    assert computed(scored("new weights", TRUNK)) == len(TRUNK)


@pytest.mark.slow
def test_the_usage_counts_tokens_whose_scores_were_known_as_cached(tiny: Tiny) -> None:
    core = make_core(tiny("llama"))
    reports = [run(core, [scored("g", TRUNK)])["g"].prompt for _ in range(2)]
    assert [report and report.cached_tokens for report in reports] == [0, HITS * BLOCK_SIZE - 1]


@pytest.mark.slow
def test_equal_scored_prompts_that_arrive_together_are_computed_once(tiny: Tiny) -> None:
    core = make_core(tiny("llama"), budget=48)
    requests = [scored(f"g{i}", TRUNK) for i in range(4)]
    outcomes = results_of(run(core, requests), requests)
    rest = len(TRUNK) - HITS * BLOCK_SIZE
    assert core.stats().prefill_tokens == len(TRUNK) + 3 * (rest + 1)
    assert len({str(scores) for scores, _ in outcomes.values()}) == 1


@pytest.mark.slow
def test_a_scored_prompt_is_kept_also_if_the_group_that_had_the_same_prompt_has_ended(tiny: Tiny) -> None:
    core = make_core(tiny("llama"))
    requests = [group("plain", TRUNK, max_tokens=3)]
    requests.append(replace(scored("kept", TRUNK, max_tokens=9), keep_s=60))
    outcomes = {str(request.request_id): GroupOutcome() for request in requests}
    for request in requests:
        core.submit(request)
    while core.busy:
        take_step(core, outcomes)
    assert core.stats().trunks_kept == 1
    before = core.stats().prefill_tokens
    run(core, [group("more", TRUNK)])
    assert core.stats().prefill_tokens == before + 1


class LogitsCounter(WrappedRunner):
    """A runner that records the number of rows of logits of each step."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.num_logits: list[int] = []

    def run(self, inputs: StepInputs) -> torch.Tensor:
        logits = super().run(inputs)
        self.num_logits.append(len(logits))
        return logits


@pytest.mark.slow
def test_a_step_has_a_bounded_number_of_scored_rows_and_of_logits(tiny: Tiny) -> None:
    parts = build_parts(
        engine_config(tiny("llama"), kv_cache_gb=gb_of(512, 2), max_num_batched_tokens=2048, max_model_len=1024)
    )
    runner = LogitsCounter(parts.runner)
    core = EngineCore(parts.info, runner, options=parts.options)
    core.submit(group("decodes", prompt_of(20, 7), n=5, max_tokens=12))
    core.step()
    core.submit(scored("long", prompt_of(700, 2)))
    core.submit(scored("other", prompt_of(300, 4)))
    sizes = []
    while core.busy:
        before = core.stats().prefill_tokens
        core.step()
        sizes.append(core.stats().prefill_tokens - before)
    assert max(sizes) == MAX_SCORED_ROWS and sum(sizes) == 1000
    core.submit(replace(scored("end", prompt_of(1000, 6)), scored_from=600))
    core.step()
    assert core.stats().prefill_tokens == 20 + 1000 + 599 + MAX_SCORED_ROWS
    assert MAX_SCORED_ROWS <= max(runner.num_logits) <= MAX_SCORED_ROWS + 8, "one row for each choice, and padding"


def test_a_step_of_scored_tokens_has_fewer_than_other_steps(tiny: Tiny) -> None:
    core = make_core(tiny("llama"), budget=32)
    for request, num_tokens in ((group("plain", prompt_of(60, 1)), 32), (scored("scored", prompt_of(60, 2)), 24)):
        before = core.stats().prefill_tokens
        core.submit(request)
        core.step()
        assert core.stats().prefill_tokens == before + num_tokens
        core.abort(request.request_id)


def test_a_step_completes_few_prompts_with_many_known_scores(tiny: Tiny) -> None:
    core, trunk = make_core(tiny("llama"), blocks=400, budget=2048, max_num_seqs=64), prompt_of(480, 2)
    run(core, [scored("first", trunk)])
    ending, outcomes = [], {f"g{number}": GroupOutcome() for number in range(48)}
    for number, name in enumerate(outcomes):
        core.submit(scored(name, (*trunk, number), max_tokens=1))
    while core.busy:
        before = sum(outcome.prompt is not None for outcome in outcomes.values())
        take_step(core, outcomes)
        ending.append(sum(outcome.prompt is not None for outcome in outcomes.values()) - before)
    assert max(ending) <= 1 + MAX_SCORED_ROWS // (len(trunk) // SCORES_PER_ROW) < sum(ending) == len(outcomes)


def test_groups_that_started_before_the_cache_was_cleared_keep_no_scores_in_it(tiny: Tiny) -> None:
    core, prompt = make_core(tiny("llama"), budget=2048), prompt_of(480, 3)
    core.submit(scored("before", prompt))
    core.step()  # its first tokens
    core.forget_prefixes(recompute=False)
    core.submit(group("after", prompt))
    while core.busy:
        core.step()
    run(core, [scored("start", prompt[:300])])
    before = core.stats().prefill_tokens
    run(core, [scored("again", prompt)])
    hits = 300 // BLOCK_SIZE * BLOCK_SIZE
    assert core.stats().prefill_tokens == before + len(prompt) - hits + 1


def encoded(*num_top: int) -> list[bytes]:
    """Returns encoded scores with these numbers of alternatives."""
    tops = [tuple((token, -token / 7) for token in range(number)) for number in num_top]
    return [_ENCODER.encode(TokenLogprob(300, -1.5, 70000, top)) for top in tops]


def test_the_scores_of_blocks_are_bounded_and_cover_smaller_needs() -> None:
    names = [BlockName(bytes([number])) for number in range(3)]
    kept, scores, two = BlockScores(), [NO_SCORE, *encoded(2)], ScoreNeeds(2)
    kept.store(names[0], scores, needs=two)
    needs = (two, ScoreNeeds(1), ScoreNeeds(3), ScoreNeeds(2, (1,)))
    assert [kept.count(names, each) for each in needs] == [1, 1, 0, 0]
    assert [*kept.read(names[:1], two)] == scores
    small = BlockScores(max_bytes=2 * kept.num_bytes)
    for name in names:
        small.store(name, scores, needs=two)
    small.check(names[1:])
    assert len(small) == 2
    small.drop(names[1])
    small.clear()
    assert small.num_bytes == len(small) == 0


def test_scores_have_no_more_alternatives_than_needed_and_stay_when_others_are_needed() -> None:
    name, kept = BlockName(b"block"), BlockScores()
    kept.store(name, encoded(3, 1), needs=ScoreNeeds(3))
    for number in range(4):
        assert [*kept.read([name], ScoreNeeds(number))] == encoded(number, min(number, 1))
    kept.store(name, encoded(4, 4), needs=ScoreNeeds(2, (7, 8)))
    kept.store(name, encoded(5, 5), needs=ScoreNeeds(5))
    assert [*kept.read([name], ScoreNeeds(3))] == encoded(3, 1)
    for token in range(2 * MAX_NEEDS):
        kept.store(name, encoded(1), needs=ScoreNeeds(0, (token,)))
        kept.check([name])
    assert len(kept) == MAX_NEEDS
    full = BlockScores(max_bytes=kept.num_bytes // len(kept))
    full.store(name, encoded(1), needs=ScoreNeeds(1))
    assert [*full.read([name], ScoreNeeds(0))] == encoded(0)  # although there is no space for both
    full.check([name])
