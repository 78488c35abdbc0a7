"""Draft tokens change nothing but the number of steps."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.engines.native.step.drafts import MAX_CHOICES, Drafter, History
from motet.engines.native.step.ngrams import NGRAM_SIZES, NgramIndex
from motet.engines.native.step.sequence import ChoiceSequence
from motet.engines.native.step.step_plan import Draft, StepPlan, TailChunk
from motet.errors import GrammarError
from motet.types import ChoiceStart, Grammar, GrammarKind, SamplingParams
from tests.engines.native.drive import GroupOutcome, group, make_core, prompt_of, run
from tests.engines.native.grammars import EOS_IDS, FORM, NUMBER, PERSON, token_of
from tests.engines.native.paper import PaperEngine, answer, group_of, request
from tests.pairwise import each_once
from tests.property_settings import examples


@dataclass(eq=False)
class Oracle(Drafter):
    """Drafts the answers of the paper engine's choices, with some errors."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    num_accepted: int = 0

    def start_step(self, sequences: Sequence[ChoiceSequence]) -> bool:
        return bool(sequences)

    def drafts(self, sequence: ChoiceSequence, *, num_choices: int) -> list[Draft]:
        start = len(sequence.output_tokens)
        rest = answer(sequence.group.prompt, sequence.sampling.seed, start + self.max_drafts)[start:]
        wrong = self.rng.randrange(self.max_drafts + 1)
        tokens = [token + (place == wrong) for place, token in enumerate(rest)]
        return [Draft(token, sequence.sampling, 0) for token in tokens[: max(0, self.limit(sequence))]]

    def update_rates(self, tails: Iterable[TailChunk], num_accepted: Mapping[ChoiceSequence, int]) -> None:
        self.num_accepted += sum(num_accepted[chunk.sequence] for chunk in tails)


@examples(30)
@given(
    seed=st.integers(0, 10**6),
    blocks=st.integers(14, 40),
    max_drafts=st.integers(1, 9),
    shapes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4), st.integers(1, 20)), min_size=1, max_size=4),
)
def test_every_choice_generates_its_answer_whatever_drafts_are_accepted(
    seed: int, blocks: int, max_drafts: int, shapes: list[tuple[int, int, int]]
) -> None:
    """On paper, each entry of memory depends on all entries that were read for it. Blocks can be short."""
    oracle = Oracle(max_drafts, 10_000, rng=random.Random(seed))
    engine = PaperEngine(blocks=blocks, budget=16, drafter=oracle)
    prompts = [[seed + place * 100 + token for token in range(length)] for place, (length, _, _) in enumerate(shapes)]
    for place, (_, n, tokens) in enumerate(shapes):
        engine.submit(request(f"g{place}", prompts[place], n=n, max_tokens=tokens))
        engine.steps(place % 2)
    engine.run_to_end()
    for place, (_, n, tokens) in enumerate(shapes):
        engine.assert_outputs(f"g{place}", prompts[place], n=n, tokens=tokens)
    assert engine.counters.accepted_tokens == oracle.num_accepted
    assert engine.counters.draft_tokens >= oracle.num_accepted


def test_accepted_drafts_save_steps() -> None:
    engine = PaperEngine(blocks=40, drafter=Oracle(4, 10_000, rng=random.Random(1)))
    engine.submit(request("g", range(9), n=2, max_tokens=40))
    assert engine.run_to_end() < 25
    engine.assert_outputs("g", range(9), n=2, tokens=40)


@pytest.mark.parametrize(("length", "num_choices", "drafts"), [(100, 1, 4), (100, 4, 2), (7000, 1, 2), (7000, 4, 0)])
def test_drafts_must_be_likelier_the_more_positions_a_row_reads(length: int, num_choices: int, drafts: int) -> None:
    """The fault: after long prompts, drafts that were rarely accepted made steps nearly twice as long, for all."""
    drafter = Drafter(4, 10_000)
    (sequence,) = group_of(request("g", [7] * length, max_tokens=50)).sequences
    while not drafter.drafts(sequence, num_choices=1):
        drafter.start_step([sequence])
    assert sequence.group.drafts is not None
    sequence.group.drafts.acceptance = [0.5] * len(NGRAM_SIZES)
    assert len(drafter.drafts(sequence, num_choices=num_choices)) == drafts


SYLLABLES = Grammar(GrammarKind.REGEX, "(abc|bac|cab){20}")


def letters(text: str) -> tuple[int, ...]:
    return (*map(token_of, text), *EOS_IDS)


FEW = {"allowed_token_ids": (5, 6, 7)}
"""With few allowed tokens, a tiny model repeats itself."""
WAYS: dict[str, dict[str, object]] = {
    "free": {"temperature": 0.5, "logprobs": 1},
    "greedy": {"temperature": 0.0, **FEW},
    "greedy, scored": {"temperature": 0.0, "logprobs": 2, **FEW},
    "hot": {"temperature": 1.5, "logprobs": 0, **FEW},
    "filtered": {"temperature": 0.3, "top_k": 2, "top_p": 0.9, "min_p": 0.01, **FEW},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.2, **FEW},
    "stop token": {"stop_token_ids": (6,), "min_tokens": 30, **FEW},
    "bad words": {"temperature": 0.0, "bad_word_ids": ((6,), (5, 5, 5), (7, 5)), **FEW},
    "bias": {"temperature": 0.1, "logit_bias": {7: 100.0, 8: 99.0, 9: 99.5}, "logprobs": 1},
    "person": {"grammar": PERSON, "ignore_eos": False, "temperature": 0.5},
    "form, scored": {"grammar": FORM, "ignore_eos": False, "logprobs": 1, "max_tokens": 300},
    "allowed letters of a word": {"grammar": SYLLABLES, "allowed_token_ids": letters("abc"), "ignore_eos": False},
    "number, penalties": {"grammar": NUMBER, "temperature": 0.3, "frequency_penalty": -1.0},
}
MANY = {"greedy", "greedy, scored", "hot", "filtered", "bias", "form, scored"}
"""Ways with which many drafts are accepted."""


def results(outcome: GroupOutcome) -> tuple[object, ...]:
    return outcome.tokens, outcome.logprobs, outcome.finish, outcome.error


@pytest.mark.slow
@pytest.mark.parametrize(("way", "n"), each_once([*WAYS], [1, 3]))
def test_tokens_logprobs_and_ends_equal_a_run_without_drafts(model: Path, way: str, n: int) -> None:
    request = group("g", prompt_of(12) * 2, n=n, seed=4, **{"max_tokens": 90, **WAYS[way]})  # type: ignore[arg-type]
    without, core = make_core(model, draft_tokens=0), make_core(model, draft_tokens=8)
    expected, outcome = run(without, [request])["g"], run(core, [request])["g"]
    assert results(outcome) == results(expected)
    assert without.stats().draft_tokens == 0
    assert core.stats().draft_tokens > core.stats().accepted_tokens > 0
    if way in MANY:
        assert core.stats().accepted_tokens > 5
        assert core.stats().steps < without.stats().steps
    assert core.stats().generated_tokens == without.stats().generated_tokens


@pytest.mark.slow
@pytest.mark.parametrize("way", ["filtered", "greedy, scored", "form, scored"])
def test_choices_that_are_resumed_anywhere_continue_as_without_drafts(model: Path, way: str) -> None:
    """This happens when a worker dies between two tokens, even if the second one was a draft."""
    fields = {"max_tokens": 90, **WAYS[way]}
    request = group("g", prompt_of(12) * 2, n=2, seed=4, **fields)  # type: ignore[arg-type]
    expected = run(make_core(model, draft_tokens=0), [request])["g"]
    core, accepted = make_core(model, draft_tokens=8), 0
    for place in range(30, 60, 7):
        starts = [
            ChoiceStart(one.index, one.seed, tuple(expected.tokens[one.index][:place])) for one in request.choices
        ]
        rest = run(core, [group("g", request.prompt, starts=starts, **fields)])["g"]  # type: ignore[arg-type]
        assert rest.tokens == {index: tokens[place:] for index, tokens in expected.tokens.items()}
        assert rest.logprobs == {index: scores[place:] for index, scores in expected.logprobs.items()}
        assert rest.finish == expected.finish
        assert core.stats().accepted_tokens > accepted
        accepted = core.stats().accepted_tokens


@pytest.mark.slow
def test_a_grammar_that_cannot_continue_fails_as_without_drafts(model: Path) -> None:
    """The token after the last draft cannot be sampled: "c" is not allowed."""
    grammar = Grammar(GrammarKind.REGEX, "(ab|ba){9}c")
    for max_tokens in (60, 19):
        request = group("g", prompt_of(12), grammar=grammar, allowed_token_ids=letters("ab"), max_tokens=max_tokens)
        expected = run(make_core(model, draft_tokens=0), [request])["g"]
        core = make_core(model, draft_tokens=8)
        outcome = run(core, [request])["g"]
        assert core.stats().accepted_tokens > 0
        assert outcome.tokens == expected.tokens
        assert isinstance(expected.error, GrammarError)
        assert str(outcome.error) == str(expected.error)


def test_a_step_whose_drafts_alone_are_not_finite_runs_again_without_them() -> None:
    _, (choice,) = drafting([1, 2])
    _, (other,) = drafting([3, 4])
    draft = Draft(7, choice.sampling, 0)
    plan = StepPlan((TailChunk(choice, 0, 1, (draft, draft)), TailChunk(other, 0, 1)))
    assert plan.groups_of([1, 2]) == set()
    assert plan.groups_of([2, 0]) == {choice.group}
    assert plan.groups_of([3]) == {other.group}
    assert plan.without_drafts() == StepPlan((TailChunk(choice, 0, 1), TailChunk(other, 0, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_all_kernels_give_the_same_bits_to_several_rows_of_a_choice(model: Path, kernels: str) -> None:
    dtype = "bfloat16" if kernels == "compiled" else "float32"
    requests = [
        group(f"g{seed}", prompt_of(20, seed), n=2, seed=seed, max_tokens=150, logprobs=1, **FEW)  # type: ignore[arg-type]
        for seed in range(3)
    ]
    expected = run(make_core(model, draft_tokens=0, kernels=kernels, dtype=dtype), requests)
    core = make_core(model, draft_tokens=6, kernels=kernels, dtype=dtype)
    outcomes = run(core, requests, stagger=5)
    assert {name: results(one) for name, one in outcomes.items()} == {
        name: results(one) for name, one in expected.items()
    }
    assert core.stats().accepted_tokens > 5


@pytest.mark.slow
def test_drafts_survive_preemption_and_leave_nothing_behind(model: Path) -> None:
    requests = [
        group(f"g{seed}", prompt_of(16, seed), n=2, seed=seed, max_tokens=150, **FEW)  # type: ignore[arg-type]
        for seed in (0, 1)
    ]
    core = make_core(model, draft_tokens=8, blocks=32, max_model_len=192)
    outcomes = run(core, requests)
    assert core.stats().preemptions > 0
    assert core.stats().accepted_tokens > 5
    expected = run(make_core(model, draft_tokens=0), requests)
    assert {name: results(one) for name, one in outcomes.items()} == {
        name: results(one) for name, one in expected.items()
    }


def drafting(prompt: Sequence[int], *, n: int = 1, **sampling: object) -> tuple[PaperEngine, list[ChoiceSequence]]:
    """Returns the sequences of a group with one output token each."""
    fields: dict[str, object] = {"max_tokens": 50, **sampling}
    engine = PaperEngine(blocks=100)
    group = engine.submit(request("g", prompt, n=n, sampling=SamplingParams(**fields)))  # type: ignore[arg-type]
    engine.step()
    return engine, list(group.sequences)


def drafted(drafter: Drafter, choice: ChoiceSequence, *, num_choices: int = 1) -> list[int]:
    return [draft.token_id for draft in drafter.drafts(choice, num_choices=num_choices)]


def test_what_followed_the_last_tokens_is_drafted() -> None:
    drafter = Drafter(8, 1000)
    _, (choice,) = drafting([1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 3, 4])
    choice.output_tokens[:] = [5, 6]
    assert drafter.start_step([choice])
    assert drafted(drafter, choice, num_choices=1) == [7, 8, 9, 9, 3]
    choice.output_tokens[:] = [77, 78]
    assert drafted(drafter, choice, num_choices=1) == []


def test_drafts_come_from_siblings_too() -> None:
    drafter = Drafter(3, 1000)
    _, (first, second) = drafting([1, 2], n=2)
    first.output_tokens[:] = [10, 11, 12, 13, 14, 15]
    second.output_tokens[:] = [10, 11]
    assert drafter.start_step([first, second])
    assert drafted(drafter, second, num_choices=1) == [12, 13, 14]
    assert drafted(drafter, second, num_choices=5) == [12], "an additional row costs more in a step with more choices"


def test_drafts_are_limited_so_that_the_token_after_them_fits() -> None:
    drafter = Drafter(8, 16)
    _, (choice,) = drafting([1, 2, 3, 4, 5, 1, 2, 3, 4, 5], max_tokens=20)
    choice.output_tokens[:] = [1, 2]
    assert drafter.start_step([choice])
    assert drafted(drafter, choice, num_choices=1) == [3, 4, 5]
    _, (choice,) = drafting([1, 2, 3, 4, 5, 1, 2, 3, 4, 5], max_tokens=4)
    choice.output_tokens[:] = [1, 2]
    assert drafter.start_step([choice])
    assert drafted(drafter, choice, num_choices=1) == [3]


def test_rejected_drafts_stop_and_are_tried_again_much_later() -> None:
    drafter = Drafter(8, 1000)
    _, (choice,) = drafting([1, 2, 3, 4, 5, 6, 7])
    choice.output_tokens[:] = [2, 3]
    tries = [0, 0]
    for step in range(400):
        assert drafter.start_step([choice])
        if drafts := drafter.drafts(choice, num_choices=4):
            tries[step >= 40] += 1
            drafter.update_rates([TailChunk(choice, 1, 2, tuple(drafts))], {choice: 0})
    assert 0 < tries[0] < 20
    assert 0 < tries[1] < 60


def test_steps_of_many_choices_have_no_drafts() -> None:
    drafter = Drafter(8, 1000)
    _, choices = drafting([1, 2, 1, 2], n=MAX_CHOICES + 1)
    assert not drafter.start_step(choices)
    assert drafter.start_step(choices[:1])
    assert not Drafter(0, 1000).start_step(choices[:1])


def test_the_index_reads_each_token_once() -> None:
    class Counted(list[int]):
        reads = 0

        def __getitem__(self, key: Any) -> Any:
            Counted.reads += 1
            return super().__getitem__(key)

    answer = Counted([1, 2, 3, 4])
    index = NgramIndex([(9, 1, 2, 7), answer])
    index.catch_up()
    assert index.lookup((8, 1, 2)) == (1, 3), "the later stream takes precedence"
    Counted.reads = 0
    for token in range(5, 50):
        answer.append(token)
        index.catch_up()
    assert Counted.reads <= 45 * len(NGRAM_SIZES)


@pytest.mark.slow
def test_an_answer_is_the_draft_when_its_prompt_is_requested_again(model: Path) -> None:
    core = make_core(model, draft_tokens=8, draft_from_history=10_000)
    requests = [group(f"g{turn}", prompt_of(24), n=2, seed=5, max_tokens=60) for turn in range(2)]
    first = run(core, requests[:1])["g0"]
    steps, accepted = core.stats().steps, core.stats().accepted_tokens
    again = run(core, requests[1:])["g1"]
    assert again.tokens == first.tokens == run(make_core(model, draft_tokens=0), requests[:1])["g0"].tokens
    assert accepted < 30
    assert core.stats().accepted_tokens - accepted > 80
    assert core.stats().steps - steps < steps / 3


def test_history_keeps_the_last_answers_of_each_prompt_in_bounded_memory() -> None:
    history = History(10)
    choices = []
    for place, (prompt, tokens) in enumerate([((1, 2), 4), ((3, 4), 3), ((1, 2), 3), ((3, 4), 5)]):
        _, (choice,) = drafting(prompt)
        choice.output_tokens[:] = [place] * tokens
        choices.append(choice)
    for choice in choices[:3]:
        history.store(choice)
    assert history.answers(choices[0].group) == [(0,) * 4, (2,) * 3]
    assert history.answers(choices[1].group) == [(1,) * 3]
    history.store(choices[3])
    assert history.answers(choices[0].group) == [(2,) * 3]
    assert history.answers(choices[1].group) == [(3,) * 5]
    _, (long,) = drafting((5, 6))
    long.output_tokens[:] = [9] * 11
    history.store(long)
    assert history.answers(long.group) == []


def test_history_is_separate_for_each_salt() -> None:
    history = History(100)
    engine = PaperEngine(blocks=100)
    groups = [engine.submit(request(salt, (1, 2), cache_salt=salt)) for salt in ("a", "b")]
    engine.step()
    history.store(groups[0].sequences[0])
    assert [len(history.answers(group)) for group in groups] == [1, 0]
