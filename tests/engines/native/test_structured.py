"""Choices with a grammar generate the same tokens as alone, however they are run."""

from pathlib import Path

import pytest

from motet.errors import GrammarError
from motet.types import ANY_ANSWER, ChoiceStart, Finish, FinishReason, Grammar, GrammarKind, Thinking, ThinkingBudget
from tests.engines.native.drive import group, make_core, prompt_of, run
from tests.engines.native.grammars import (
    NUMBER,
    PERSON,
    STOP,
    WORD,
    assert_persons,
    person,
    speaking_model,
    text_of,
    token_of,
)
from tests.engines.native.pair import CorePair, alone, with_ticket

pytestmark = pytest.mark.slow

WAYS: dict[str, dict[str, object]] = {
    "plain": {"logprobs": 3},
    "filtered": {"temperature": 1.3, "top_k": 40, "top_p": 0.9},
    "edited": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {50: 4.0}, "min_p": 0.01},
}


@pytest.mark.parametrize("way", WAYS)
def test_choice_i_of_a_group_is_the_single_request_with_its_seed(model: Path, way: str) -> None:
    fields = {**WAYS[way], "grammar": PERSON, "max_tokens": 120, "ignore_eos": False}
    prompt = prompt_of(30)
    together = run(make_core(model), [group("g", prompt, n=4, seed=11, **fields)])["g"]  # type: ignore[arg-type]
    singles = [group(f"s{i}", prompt, seed=11 + i, **fields) for i in range(4)]  # type: ignore[arg-type]
    alone = run(make_core(model), singles, stagger=3)
    assert_persons(together)
    for i in range(4):
        assert together.tokens[i] == alone[f"s{i}"].tokens[0]
        assert together.finish[i] == alone[f"s{i}"].finish[0]
        assert together.logprobs[i] == alone[f"s{i}"].logprobs[0]
    assert len({tuple(tokens) for tokens in together.tokens.values()}) > 1


def test_a_prompt_in_chunks_changes_nothing(model: Path) -> None:
    requests = [person("g", prompt_of(90), n=3, seed=4)]
    full = run(make_core(model), requests)["g"]
    assert_persons(full)
    assert run(make_core(model, budget=7, max_num_seqs=4), requests)["g"].tokens == full.tokens


def test_a_preempted_choice_keeps_its_position_in_the_grammar(model: Path) -> None:
    requests = [person("a", prompt_of(40), n=4, seed=2), person("b", prompt_of(33, 1), n=4, seed=9)]
    full = run(make_core(model), requests)
    small = make_core(model, blocks=41, max_model_len=160)  # the shortest eight persons need more than twice as many
    disturbed = run(small, requests)
    assert small.stats().preemptions > 0
    for name in ("a", "b"):
        assert_persons(disturbed[name])
        assert disturbed[name].tokens == full[name].tokens


def test_a_choice_resumed_after_any_token_generates_the_same_rest(model: Path) -> None:
    prompt = prompt_of(20)
    full = run(make_core(model), [person("g", prompt, n=2, seed=6)])["g"]
    resumed = [
        person(f"{cut}", prompt, starts=[ChoiceStart(i, 6 + i, tuple(full.tokens[i][:cut])) for i in (0, 1)])
        for cut in range(1, min(map(len, full.tokens.values())) - 1)
    ]
    assert len(resumed) > 20
    for cut, rest in run(make_core(model, blocks=1024), resumed, stagger=1).items():
        assert {i: full.tokens[i][: int(cut)] + rest.tokens[i] for i in (0, 1)} == full.tokens


@pytest.mark.parametrize("opened", [False, True])
def test_a_choice_that_thinks_first_is_resumed_in_and_after_its_thoughts(model: Path, opened: bool) -> None:
    thinking = Thinking("[", "]", opened=opened)
    fields: dict[str, object] = {
        "grammar": Grammar(WORD.kind, WORD.source, thinking),
        "max_tokens": 60,
        "ignore_eos": False,
        "logit_bias": {token_of("["): 8.0, token_of("]"): 5.0},
    }
    prompt = prompt_of(20)
    full = run(make_core(model), [group("g", prompt, n=6, seed=5, **fields)])["g"]  # type: ignore[arg-type]
    core = make_core(model)
    for cut in range(1, max(map(len, full.tokens.values())), 3):
        starts = [ChoiceStart(i, 5 + i, tuple(t[:cut])) for i, t in full.tokens.items() if len(t) > cut]
        rest = run(core, [group("rest", prompt, starts=starts, **fields)])["rest"]  # type: ignore[arg-type]
        assert {start.index: [*start.output_tokens, *rest.tokens[start.index]] for start in starts} == {
            start.index: full.tokens[start.index] for start in starts
        }
    ended = [text_of(tokens) for index, tokens in full.tokens.items() if full.finish[index] == STOP]
    assert any("]" in text for text in ended)
    assert {text.rpartition("]")[2].strip() for text in ended} <= {"yes", "no", "hello"}


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_reasoning_with_a_budget_ends_in_time_with_drafts_and_after_any_resumption(
    model: Path, max_tokens: int
) -> None:
    budget = ThinkingBudget(max_tokens, token_of("["), token_of("]"))
    thinking = Thinking("[", "]", opened=True, budget=budget)
    fields: dict[str, object] = {"grammar": Grammar(GrammarKind.LARK, ANY_ANSWER, thinking), "max_tokens": 20}
    prompt = prompt_of(20)
    full = run(make_core(model), [group("g", prompt, n=6, seed=5, **fields)])["g"]  # type: ignore[arg-type]
    for tokens in full.tokens.values():
        assert token_of("]") in tokens[: max_tokens + 1]
    for cut in range(1, 10):
        starts = [ChoiceStart(i, 5 + i, tuple(t[:cut])) for i, t in full.tokens.items() if len(t) > cut]
        rest = run(make_core(model), [group("rest", prompt, starts=starts, **fields)])["rest"]  # type: ignore[arg-type]
        assert all([*one.output_tokens, *rest.tokens[one.index]] == full.tokens[one.index] for one in starts)


def test_choices_with_and_without_grammars_share_steps_and_do_not_affect_each_other(model: Path) -> None:
    requests = [
        person("person", prompt_of(25), n=3, seed=1),
        group("free", prompt_of(31, 1), n=3, seed=2, max_tokens=40),
        group("number", prompt_of(18, 2), n=2, seed=3, grammar=NUMBER, max_tokens=30),
        group("biased", prompt_of(18, 3), n=2, seed=3, logit_bias={7: 3.0}, min_tokens=5, max_tokens=40),
        group("word", prompt_of(12, 4), n=4, seed=5, grammar=WORD, temperature=1.5),
        group("cold", prompt_of(12, 5), n=3, grammar=PERSON, temperature=0.0, max_tokens=60),
        group("free and cold", prompt_of(14, 6), n=2, temperature=0.0),
    ]
    together = run(make_core(model), requests, stagger=2)
    for request in requests:
        alone = run(make_core(model), [request])[request.request_id]
        assert together[request.request_id].tokens == alone.tokens
    assert all(text_of(tokens[:-1]).isdecimal() for tokens in together["number"].tokens.values())
    assert {text_of(tokens) for tokens in together["word"].tokens.values()} <= {"yes", "no", "hello"}


def test_choices_after_a_transfer_equal_those_of_a_single_engine(model: Path) -> None:
    request = person("g", prompt_of(50), n=3, seed=8)
    pair = CorePair(model)
    pair.submit(with_ticket(request, pair.prefill(request)))
    pair.finish()
    pair.check_empty()
    assert_persons(pair.outcomes["g"])
    assert {"g": pair.outcomes["g"].tokens} == alone(model, request)


def test_the_ticket_of_a_group_with_a_refused_grammar_is_released(model: Path) -> None:
    pair = CorePair(model)
    request = group("g", prompt_of(50), grammar=Grammar(GrammarKind.REGEX, "((("))
    ticket = pair.prefill(request)
    with pytest.raises(GrammarError):
        pair.submit(with_ticket(request, ticket))
    assert pair.d_transfers.released == [ticket]
    pair.check_empty()


def test_a_greedy_group_is_computed_once_and_its_grammar_with_it(model: Path) -> None:
    core = make_core(model)
    outcome = run(core, [person("g", prompt_of(30), n=5, temperature=0.0)])["g"]
    assert_persons(outcome)
    assert len({tuple(tokens) for tokens in outcome.tokens.values()}) == 1
    assert core.stats().greedy_choices_shared == 4


def test_log_probabilities_are_computed_without_the_grammar(model: Path) -> None:
    fields: dict[str, object] = {"seed": 3, "logprobs": 5, "max_tokens": 4}
    free = run(make_core(model), [group("g", prompt_of(30), **fields)])["g"]  # type: ignore[arg-type]
    bound = run(make_core(model), [group("g", prompt_of(30), **fields, grammar=NUMBER)])["g"]  # type: ignore[arg-type]
    assert bound.logprobs[0][0].top == free.logprobs[0][0].top
    assert bound.logprobs[0][0].rank > 1


@pytest.mark.parametrize(
    "fields", [{"ignore_eos": True}, {"min_tokens": 15, "ignore_eos": False}, {"min_tokens": 15}], ids=str
)
def test_a_choice_ends_where_its_grammar_ends_whatever_the_request_says(model: Path, fields: dict[str, object]) -> None:
    outcome = run(make_core(model), [group("g", prompt_of(20), n=6, grammar=WORD, **fields)])["g"]  # type: ignore[arg-type]
    assert {text_of(tokens) for tokens in outcome.tokens.values()} <= {"yes", "no", "hello"}
    assert set(outcome.finish.values()) == {STOP}


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 12, "ignore_eos": False}], ids=str)
def test_a_choice_does_not_end_before_it_must_if_the_request_forbids_it(model: Path, fields: dict[str, object]) -> None:
    """The grammar allows four to twelve digits."""
    free = run(make_core(model), [group("g", prompt_of(20), n=6, grammar=NUMBER, ignore_eos=False)])["g"]
    held = run(make_core(model), [group("g", prompt_of(20), n=6, grammar=NUMBER, **fields)])["g"]  # type: ignore[arg-type]
    assert min(len(tokens) for tokens in free.tokens.values()) < 13
    assert [len(tokens) for tokens in held.tokens.values()] == [13] * 6
    assert set(held.finish.values()) == {STOP}


def test_a_stop_token_ends_a_choice_only_where_its_grammar_allows_the_end(model: Path) -> None:
    five, letter = token_of("5"), token_of("a")
    bias = {five: 5.0, letter: 100.0}
    requests = [
        group("g", prompt_of(20), n=6, grammar=NUMBER, stop_token_ids=(five, letter), logit_bias=bias),
        group("h", prompt_of(20), n=6, grammar=NUMBER, stop_token_ids=(five,), logit_bias=bias, min_tokens=4),
    ]
    outcomes = run(make_core(model), requests)
    assert set(outcomes["g"].finish.values()) == {Finish(FinishReason.STOP, letter)}
    assert Finish(FinishReason.STOP, five) in outcomes["h"].finish.values()
    for outcome in outcomes.values():
        for index, tokens in outcome.tokens.items():
            assert letter not in tokens[:-1] and len(tokens) > 4
            assert five not in tokens[:-1] and (tokens[-1] == five) == (outcome.finish[index].stop_token_id == five)
    assert min(len(tokens) for tokens in outcomes["h"].tokens.values()) > 4


def test_every_end_of_sequence_token_of_the_model_can_be_sampled(tmp_path: Path) -> None:
    core = make_core(speaking_model(tmp_path, eos_token_id=[2, 0]))
    outcome = run(core, [group("g", prompt_of(20), n=40, grammar=WORD, temperature=3.0)])["g"]
    assert {tokens[-1] for tokens in outcome.tokens.values()} == {0, 2}
    assert set(outcome.finish.values()) == {STOP}


def test_a_model_without_end_of_sequence_ends_with_its_grammar(tmp_path: Path) -> None:
    core = make_core(speaking_model(tmp_path, eos_token_id=None))
    assert core.info.eos_token_ids == ()
    outcome = run(core, [group("g", prompt_of(20), n=8, grammar=WORD)])["g"]
    assert {text_of(tokens) for tokens in outcome.tokens.values()} <= {"yes", "no", "hello"}
    assert set(outcome.finish.values()) == {STOP}


def test_a_cut_answer_ends_with_length(model: Path) -> None:
    outcome = run(make_core(model), [person("g", prompt_of(20), max_tokens=6)])["g"]
    assert outcome.finish[0] == Finish(FinishReason.LENGTH)


def test_a_group_whose_grammar_cannot_be_followed_is_refused_and_the_next_one_runs(model: Path) -> None:
    core = make_core(model)
    for request in (
        person("bad", prompt_of(20), starts=[ChoiceStart(0, 0), ChoiceStart(1, 1, tuple(prompt_of(4)))]),
        group("broken", prompt_of(20), grammar=Grammar(GrammarKind.REGEX, "(((")),
    ):
        with pytest.raises(GrammarError):
            core.submit(request)
    core.check()
    assert not core.busy
    assert_persons(run(core, [person("good", prompt_of(20))])["good"])


def test_a_model_without_a_tokenizer_refuses_only_groups_with_a_grammar(model: Path, tmp_path: Path) -> None:
    no_tokenizer = speaking_model(tmp_path / "no_tokenizer")
    (no_tokenizer / "tokenizer.json").unlink()
    core = make_core(no_tokenizer)
    with pytest.raises(GrammarError, match=r"no tokenizer\.json in .*no_tokenizer"):
        core.submit(person("g", prompt_of(20)))
    assert len(run(core, [group("free", prompt_of(20))])["free"].tokens[0]) == 20
    assert_persons(run(make_core(no_tokenizer, tokenizer_path=str(model)), [person("g", prompt_of(20))])["g"])
