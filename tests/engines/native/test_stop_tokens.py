"""A stop token ends a choice with a grammar only where the grammar allows the end."""

import json
from pathlib import Path

import pytest

from motet.types import ChoiceStart, Finish, FinishReason, GenerateRequest, Grammar, GrammarKind, Thinking
from tests.engines.native.drive import GroupOutcome, group, make_core, prompt_of, run
from tests.engines.native.grammars import NUMBER, STOP, WORD, matcher_of, speaking_model, text_of, token_of

EOS = 2
CAT = Grammar(GrammarKind.REGEX, r'\{"name": "[a-z ]{4,9}", "lives": [1-9][0-9]{0,2}\}')


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_model(tmp_path_factory.mktemp("model"))


def stopped_by(letter: str) -> Finish:
    return Finish(FinishReason.STOP, token_of(letter))


def biased(*letters: str, bias: float = 12.0) -> dict[int, float]:
    return {token_of(letter): bias for letter in letters}


def cat(**fields: object) -> GenerateRequest:
    return group("g", prompt_of(20), **{"n": 4, "grammar": CAT, "max_tokens": 60, "ignore_eos": False, **fields})  # type: ignore[arg-type]


def assert_complete(outcome: GroupOutcome) -> None:
    assert outcome.error is None
    for index, tokens in outcome.tokens.items():
        assert outcome.finish[index] != Finish(FinishReason.LENGTH)
        value = json.loads(text_of(tokens[:-1]))
        assert 4 <= len(value["name"]) <= 9 and 0 <= value["lives"] <= 999


@pytest.mark.slow
@pytest.mark.parametrize("letter", ["a", "1", '"', ":", "{", " "])
@pytest.mark.parametrize("scored", [False, True])
def test_a_stop_token_does_not_cut_json(model: Path, letter: str, scored: bool) -> None:
    """With log-probabilities, each token is sampled; without them, forced tokens are not."""
    bias, logprobs = biased(letter), 0 if scored else None
    request = cat(seed=3, stop_token_ids=(token_of(letter),), logit_bias=bias, logprobs=logprobs)
    outcome = run(make_core(model), [request])["g"]
    assert_complete(outcome)
    if letter == "1":  # the grammar requires the others
        assert all(token_of(letter) not in tokens[:-1] for tokens in outcome.tokens.values())


@pytest.mark.slow
def test_a_stop_token_ends_a_complete_answer_even_if_the_grammar_lacks_it(model: Path) -> None:
    stop = {"stop_token_ids": (token_of("x"),), "logit_bias": biased("x", bias=40.0)}
    outcome = run(make_core(model), [cat(seed=1, **stop)])["g"]
    assert_complete(outcome)
    assert set(outcome.finish.values()) == {stopped_by("x")}
    outcome = run(make_core(model), [group("g", prompt_of(9), n=3, grammar=NUMBER, ignore_eos=False, **stop)])["g"]  # type: ignore[arg-type]
    for tokens in outcome.tokens.values():
        assert text_of(tokens[:-1]).isdecimal() and len(text_of(tokens[:-1])) >= 4
    assert set(outcome.finish.values()) == {stopped_by("x")}


@pytest.mark.slow
def test_a_stop_token_does_not_end_reasoning_before_an_answer(model: Path) -> None:
    fields: dict[str, object] = {
        "grammar": Grammar(WORD.kind, WORD.source, Thinking("[", "]", opened=True)),
        "stop_token_ids": (token_of("a"),),
        "logit_bias": biased("a") | biased("]", bias=6.0),
        "max_tokens": 60,
        "ignore_eos": False,
    }
    outcome = run(make_core(model), [group("g", prompt_of(9), n=4, seed=2, **fields)])["g"]  # type: ignore[arg-type]
    for index, tokens in outcome.tokens.items():
        if outcome.finish[index] != Finish(FinishReason.LENGTH):
            assert text_of(tokens).rstrip("a").rpartition("]")[2].strip() in ("yes", "no", "hello")


@pytest.mark.slow
def test_where_a_grammar_allows_only_a_stop_token_the_choice_continues(model: Path) -> None:
    a = token_of("a")
    three = Grammar(GrammarKind.REGEX, "aaa")
    fields = {"grammar": three, "stop_token_ids": (a,), "allowed_token_ids": (a, EOS), "ignore_eos": False}
    for logprobs in (None, 0):
        request = group("g", prompt_of(9), n=2, logprobs=logprobs, **fields)  # type: ignore[arg-type]
        for index, tokens in run(make_core(model), [request])["g"].tokens.items():
            assert tokens[:3] == [a, a, a] and len(tokens) == 4, index


@pytest.mark.slow
def test_min_tokens_and_a_resumed_choice_follow_the_same_rule(model: Path) -> None:
    stop = {"stop_token_ids": (token_of("x"),), "logit_bias": biased("x", bias=40.0), "grammar": NUMBER}
    fields = {**stop, "ignore_eos": False, "max_tokens": 30, "min_tokens": 7}
    full = run(make_core(model), [group("g", prompt_of(9), n=2, seed=5, **fields)])["g"]  # type: ignore[arg-type]
    for index, tokens in full.tokens.items():
        assert len(tokens) >= 7
        for cut in (1, 3, 5):
            start = ChoiceStart(index, 5 + index, tuple(tokens[:cut]))
            rest = run(make_core(model), [group("r", prompt_of(9), starts=[start], **fields)])["r"]  # type: ignore[arg-type]
            assert tokens[:cut] + rest.tokens[index] == tokens


@pytest.mark.slow
def test_each_end_of_sequence_token_is_sampled_only_after_a_complete_answer(tmp_path: Path) -> None:
    model = speaking_model(tmp_path, eos_token_id=[EOS, 1])
    outcome = run(make_core(model), [cat(seed=3, logit_bias={1: 20.0})])["g"]
    assert_complete(outcome)
    assert {tokens[-1] for tokens in outcome.tokens.values()} == {1}
    assert set(outcome.finish.values()) == {STOP}


def test_a_grammar_that_accepts_and_a_mask_with_its_end_are_the_same() -> None:
    for text, accepts in (("12", False), ("1234", True), ("123456", True)):
        matcher = matcher_of(NUMBER, [token_of(letter) for letter in text])
        assert matcher.accepting is accepts
