"""Tokens that a grammar forces are appended without logits, which changes only the number of steps.

Log-probabilities need logits, so choices with log-probabilities sample every token. They are the reference.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from motet.engines.native.core import EngineCore
from motet.grammar.compiled_grammar import fill_masks, mask_words
from motet.types import ChoiceStart, Finish, FinishReason, GenerateRequest, Grammar, GrammarKind
from tests.engines.native.drive import GroupOutcome, group, make_core, prompt_of, run
from tests.engines.native.grammars import (
    FORM,
    LONG,
    NUMBER,
    PERSON,
    STOP,
    WORD,
    assert_persons,
    matcher_of,
    person,
    speaking_model,
    text_of,
    token_of,
)
from tests.pairwise import each_once
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.slow


GRAMMARS = [
    pytest.param(grammar, id=name)
    for name, grammar in {"form": FORM, "person": PERSON, "number": NUMBER, "word": WORD}.items()
]


def form(name: str, length: int, **changes: object) -> GenerateRequest:
    return group(name, prompt_of(length), **{"grammar": FORM, "max_tokens": 300, "ignore_eos": False, **changes})  # type: ignore[arg-type]


def sampled_fully(core: EngineCore, request: GenerateRequest) -> GroupOutcome:
    """Returns the outcome of a request whose tokens are all sampled."""
    sampling = {name: getattr(request.sampling, name) for name in request.sampling.__struct_fields__}
    scored = group("sampled", request.prompt, starts=request.choices, **{**sampling, "logprobs": 0})
    return run(core, [scored])["sampled"]


def assert_same(outcome: GroupOutcome, expected: GroupOutcome) -> None:
    assert outcome.error is expected.error is None
    assert outcome.tokens == expected.tokens
    assert outcome.finish == expected.finish


WAYS: dict[str, dict[str, object]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "filtered": {"temperature": 1.4, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.7, "frequency_penalty": 1.5, "presence_penalty": -1.0},
    "bias": {"logit_bias": dict.fromkeys(range(20, 90), -100.0)},
    "min_tokens": {"min_tokens": 250, "ignore_eos": True},
    "allowed tokens": {"allowed_token_ids": tuple(range(VOCAB_SIZE))},
}


@pytest.mark.parametrize(("way", "grammar"), each_once([*WAYS], GRAMMARS))
def test_forced_tokens_equal_the_tokens_that_would_have_been_sampled(model: Path, way: str, grammar: Grammar) -> None:
    core = make_core(model, draft_tokens=0)
    request = form("g", 30, n=4, seed=7, grammar=grammar, **WAYS[way])
    outcome = run(core, [request])["g"]
    steps, forced = core.stats().steps, core.stats().forced_tokens
    assert_same(outcome, sampled_fully(core, request))
    assert core.stats().forced_tokens == forced, "every token was sampled"
    assert core.stats().generated_tokens == 2 * sum(map(len, outcome.tokens.values()))
    if way == "allowed tokens":
        assert forced == 0
    elif grammar is FORM and way != "bias":
        assert forced > 0.6 * sum(map(len, outcome.tokens.values()))
        assert steps < 0.4 * (core.stats().steps - steps)


@pytest.mark.parametrize("changes", [{"budget": 7, "max_num_seqs": 4}, {"blocks": 96, "max_model_len": 384}], ids=str)
def test_runs_longer_than_a_step_or_than_memory_change_nothing(model: Path, changes: dict[str, int]) -> None:
    requests = [form("a", 40, n=4, seed=2), form("b", 33, n=4, seed=9)]
    small = make_core(model, draft_tokens=0, **changes)  # type: ignore[arg-type]
    outcomes = run(small, requests)
    assert small.stats().forced_tokens > 0
    if "blocks" in changes:
        assert small.stats().preemptions > 0
    for request in requests:
        assert_same(outcomes[str(request.request_id)], sampled_fully(make_core(model, draft_tokens=0), request))


def test_only_earlier_output_tokens_count_as_replayed(model: Path) -> None:
    core = make_core(model, draft_tokens=0)
    full = run(core, [form("g", 20, n=2)])["g"]
    assert core.stats().replayed_tokens == 0
    starts = [ChoiceStart(index, index, tuple(tokens[:100])) for index, tokens in full.tokens.items()]
    rest = run(core, [form("rest", 20, starts=starts)])["rest"]
    assert {index: [*tokens[:100], *rest.tokens[index]] for index, tokens in full.tokens.items()} == full.tokens
    assert core.stats().replayed_tokens == 2 * 99


@pytest.mark.parametrize("max_tokens", [1, 2, 101])
def test_a_run_ends_with_the_answer(model: Path, max_tokens: int) -> None:
    request = form("g", 20, n=3, max_tokens=max_tokens)
    outcome = run(make_core(model, draft_tokens=0), [request])["g"]
    assert {len(tokens) for tokens in outcome.tokens.values()} == {max_tokens}
    assert set(outcome.finish.values()) == {Finish(FinishReason.LENGTH)}
    assert_same(outcome, sampled_fully(make_core(model, draft_tokens=0), request))


def test_a_run_ends_at_the_context_limit(model: Path) -> None:
    request = form("g", 20, n=2)
    outcome = run(make_core(model, draft_tokens=0, max_model_len=64), [request])["g"]
    assert {len(tokens) for tokens in outcome.tokens.values()} == {44}
    assert_same(outcome, sampled_fully(make_core(model, draft_tokens=0, max_model_len=64), request))


@pytest.mark.parametrize("min_tokens", [0, 60])
@pytest.mark.parametrize("draft_tokens", [0, 4])
def test_a_stop_token_inside_a_run_does_not_end_its_choice(model: Path, min_tokens: int, draft_tokens: int) -> None:
    request = form("g", 20, n=3, stop_token_ids=(token_of("x"),), min_tokens=min_tokens)
    outcome = run(make_core(model, draft_tokens=draft_tokens), [request])["g"]
    for tokens in outcome.tokens.values():
        assert json.loads(text_of(tokens[:-1]).rstrip("x"))["introduction"] == LONG
    assert_same(outcome, sampled_fully(make_core(model, draft_tokens=0), request))


def test_a_forced_end_takes_no_step(model: Path) -> None:
    core = make_core(model, draft_tokens=0)
    outcome = run(core, [group("g", prompt_of(20), grammar=Grammar(GrammarKind.REGEX, "[xy]"), ignore_eos=False)])["g"]
    assert len(outcome.tokens[0]) == 2
    assert outcome.finish[0] == STOP
    assert core.stats().steps == 1


def test_with_two_end_of_sequence_tokens_the_end_is_sampled(tmp_path: Path) -> None:
    core = make_core(speaking_model(tmp_path, eos_token_id=[2, 0]), draft_tokens=0)
    request = form("g", 20, n=12, temperature=2.0)
    outcome = run(core, [request])["g"]
    assert {tokens[-1] for tokens in outcome.tokens.values()} == {0, 2}
    assert_same(outcome, sampled_fully(core, request))


def test_groups_with_and_without_forced_tokens_share_steps(model: Path) -> None:
    core = make_core(model, draft_tokens=0)
    requests = [
        form("form", 25, n=3, seed=1),
        group("free", prompt_of(31, 1), n=3, seed=2, max_tokens=40),
        form("scored", 25, n=3, seed=1, logprobs=2),
        person("person", prompt_of(18, 2), n=2, seed=3),
    ]
    together = run(core, requests, stagger=2)
    assert together["form"].tokens == together["scored"].tokens
    assert all(len(together["scored"].logprobs[i]) == len(together["scored"].tokens[i]) for i in range(3))
    assert_persons(together["person"])
    assert together["free"].tokens == run(make_core(model, draft_tokens=0), [requests[1]])["free"].tokens


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_each_forced_token_is_the_only_one_that_its_mask_allows(model: Path, grammar: Grammar) -> None:
    answers = run(make_core(model, draft_tokens=0), [form("g", 20, n=4, grammar=grammar, temperature=1.5)])[
        "g"
    ].tokens.values()
    mask = np.zeros((1, mask_words(VOCAB_SIZE)), np.int32)
    for tokens in answers:
        assert text_of(tokens)
        matcher = matcher_of(grammar)
        known: list[int] = []
        for token_id in tokens:
            known = known or matcher.forced()
            fill_masks([matcher], mask)
            allowed = np.unpackbits(mask.view(np.uint8)[0], bitorder="little").nonzero()[0]
            if known:
                assert allowed.tolist() == [known.pop(0)] == [token_id]
            matcher.consume(token_id)
