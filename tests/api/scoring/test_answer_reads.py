"""Probabilities of answers: compared with an enumeration of all replies of a small model of language, and in an engine
with the logits of transformers."""

import math
import random
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from types import MappingProxyType

import pytest

from motet.api.scoring.answer_reads import MAX_READ_TOKENS, AnswerReads, Distribution, Read, Tokens
from motet.api.scoring.decision_plan import ReadGroup
from tests.engines.native.drive import group, make_core, prompt_of, run

END = 9
TEXT_TOKENS = range(4)

Model = Mapping[Tokens, Mapping[int, float]]
"""The distribution of the next token after some tokens, as log-probabilities."""


def small_model(rng: random.Random, *, longest: int) -> Model:
    """Returns random distributions after all texts of at most `longest` tokens. After the longest, a reply ends."""
    model = {}
    for length in range(longest + 1):
        for tokens in product(TEXT_TOKENS, repeat=length):
            weights = {token: rng.random() if length < longest else 0.0 for token in TEXT_TOKENS} | {END: rng.random()}
            total = sum(weights.values())
            model[tokens] = {
                token: math.log(weight / total) if weight else -9999.0 for token, weight in weights.items()
            }
    return MappingProxyType(model)


def replies(model: Model, tokens: Tokens = (), probability: float = 1.0) -> Mapping[Tokens, float]:
    """Returns the probabilities of all complete replies."""
    found = {tokens: probability * math.exp(model[tokens][END])}
    for token in TEXT_TOKENS:
        if (own := probability * math.exp(model[tokens][token])) > 0.0:
            found |= replies(model, (*tokens, token), own)
    return found


def read(reads: Sequence[Sequence[Read]], model: Model) -> Mapping[Tokens, Mapping[int, float]]:
    known: dict[Tokens, dict[int, float]] = {}
    for one in (one for own in reads for one in own):
        known.setdefault(one.prefix, {}).update({token: model[one.prefix][token] for token in one.token_ids})
    return known


@pytest.mark.parametrize("seed", range(10))
def test_probabilities_are_those_of_all_replies_that_give_an_answer(seed: int) -> None:
    """A reply gives an answer with which it starts, or, if another answer starts with it too, which is all of it."""
    rng = random.Random(seed)
    model = small_model(rng, longest=4)
    texts = [tuple(rng.choices(TEXT_TOKENS, k=rng.randint(1, 3))) for _ in range(6)]
    answers = list(dict.fromkeys(texts))
    reads = AnswerReads(answers, end_token_ids=(END,))
    found = reads.distribution(read([*reads.groups(max_reads=3)], model))

    exact = dict.fromkeys(answers, 0.0)
    for reply, probability in replies(model).items():
        for answer in answers:
            if reply == answer if answer in reads.prefix_answers else reply[: len(answer)] == answer:
                exact[answer] += probability
    total = sum(exact.values())
    assert found.probabilities == pytest.approx([exact[answer] / total for answer in answers])
    assert found.confidence == pytest.approx(max(exact.values()))
    assert sum(found.probabilities) == pytest.approx(1.0)
    assert total <= 1.0 + 1e-9, "no reply counts for two answers"


def test_groups_have_few_tokens_and_few_reads() -> None:
    answers = [*((token,) for token in range(40)), (50, 51, 52), (50, 53)]
    groups = [*AnswerReads(answers, end_token_ids=(END,)).groups(max_reads=2)]
    assert all(len({token for one in own for token in one.token_ids}) <= MAX_READ_TOKENS for own in groups)
    assert all(1 <= len(own) <= 2 for own in groups)
    known = {(one.prefix, token) for own in groups for one in own for token in one.token_ids}
    assert known == {*(((), token) for token in (*range(40), 50)), ((50,), 51), ((50,), 53), ((50, 51), 52)}


def test_impossible_answers_have_probabilities() -> None:
    lowest = AnswerReads([(1,), (2,)], end_token_ids=()).distribution({(): {1: -9999.0, 2: -9999.0}})
    assert (lowest.probabilities, lowest.confidence) == ([0.5, 0.5], 0.0)
    assert Distribution([0.25, 0.5, 0.25], 1.0).mean == 1.0
    assert Distribution([0.5, 0.5], 1.0).best == 0


def test_an_engine_reads_what_transformers_computes_in_any_batch_and_from_the_cache(folder: Path) -> None:
    """The input of all prompts is computed once."""
    from tests.tiny_models import Reference

    ends = (0, 2)
    answers = [(5,), (5, 6), (5, 6, 7), (8, 9), (10,)]
    questions = [
        AnswerReads(answers, end_token_ids=ends),
        AnswerReads([(7,), (8,)], end_token_ids=ends),
        AnswerReads(answers[2:], end_token_ids=()),
    ]
    trunk = prompt_of(200)
    prompts = [trunk + prompt_of(20 + number, number + 1) for number in range(15)]
    asked = [(number, prompt, questions[number % 3]) for number, prompt in enumerate(prompts)]
    groups = {
        f"{number}-{place}": (ReadGroup(number, reads), prompt)
        for number, prompt, one in asked
        for place, reads in enumerate(one.groups(max_reads=3))
    }
    requests = [
        reads.applied_to(group(name, prompt, temperature=0.0, logprobs=0, ignore_eos=False))
        for name, (reads, prompt) in groups.items()
    ]

    def found(outcomes: Mapping[str, object]) -> list[Distribution]:
        known: list[dict[Tokens, dict[int, float]]] = [{} for _ in asked]
        for name in outcomes:
            reads, _ = groups[name]
            for index, one in enumerate(reads.reads):
                (entry,) = outcomes[name].logprobs[index]  # type: ignore[attr-defined]
                values = dict(entry.top)
                values = {token: values[token] for token in one.token_ids}
                known[reads.question].setdefault(one.prefix, {}).update(values)
        return [one.distribution(values) for (_, _, one), values in zip(asked, known, strict=True)]

    core = make_core(folder)
    first = run(core, requests)
    computed = core.stats().prompt_tokens - core.stats().cached_tokens
    assert computed <= len(trunk) + len(requests) * (60 + 8)
    assert computed < sum(map(len, prompts)) / 2
    expected = found(first)
    assert found(run(core, requests)) == expected
    assert found(run(make_core(folder), requests, stagger=3)) == expected
    assert found(run(make_core(folder, prefix_cache=False, budget=64), requests[::-1])) == expected

    reference = Reference(folder)
    for (_, prompt, one), own in zip(asked[:6], expected, strict=False):
        sums = []
        for answer in one.answers:
            logprobs = reference.logits(prompt + answer).log_softmax(-1)[len(prompt) - 1 :]
            total = sum(float(logprobs[place, token]) for place, token in enumerate(answer))
            ended = float(logprobs[-1][list(ends)].logsumexp(0)) if answer in one.prefix_answers else 0.0
            sums.append(total + ended)
        weights = [math.exp(value - max(sums)) for value in sums]
        assert own.probabilities == pytest.approx([weight / sum(weights) for weight in weights], abs=1e-5)
        assert own.confidence == pytest.approx(math.exp(max(sums)), rel=1e-4)
