"""Tokens that a grammar forbids are -inf before any other change of the logits, with any other choices in the batch."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from motet.engines.native.sample.edits import GrammarMasks
from motet.engines.native.sample.lanes import SampleRow, plan_batches
from motet.engines.native.sample.sampler import Sampler
from motet.engines.native.sample.state import ChoiceSampling, PromptTokens
from motet.grammar.compiled_grammar import fill_masks, mask_words
from motet.types import Grammar, SamplingParams
from tests.engines.native.grammars import EOS_IDS, NUMBER, PERSON, WORD, matcher_of, tiny_tokenizer
from tests.engines.native.sample.parameter_sets import PARAMETER_SETS
from tests.tiny_models import VOCAB_SIZE

CPU = torch.device("cpu")
WIDTH = 512
"""Size of the vocabulary, padded to a multiple of the block."""


def state_of(
    params: SamplingParams, grammar: Grammar | None = None, text: str = "", *, seed: int = 0
) -> ChoiceSampling:
    output_tokens = tiny_tokenizer().encode(text) if text else []
    return ChoiceSampling(
        params,
        seed=seed,
        prompt=PromptTokens((5, 6)),
        eos_token_ids=EOS_IDS,
        output_tokens=output_tokens,
        matcher=None if grammar is None else matcher_of(grammar, output_tokens),
    )


def allowed(grammar: Grammar, text: str = "") -> torch.Tensor:
    """Returns the mask [vocabulary] as bools, read bit by bit."""
    bits = np.zeros((1, mask_words(VOCAB_SIZE)), np.int32)
    assert fill_masks([matcher_of(grammar, tiny_tokenizer().encode(text) if text else ())], bits) == {}
    return torch.tensor([bool(int(bits[0, t // 32]) >> t % 32 & 1) for t in range(VOCAB_SIZE)])


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(rows)) * 3


PLAIN = SamplingParams(max_tokens=20)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (1, 3, 4), (4, 2, 0), (0, 2)])
def test_only_forbidden_tokens_of_lanes_with_a_grammar_are_changed(order: Sequence[int], device: str) -> None:
    states = [
        state_of(PLAIN),
        state_of(PLAIN, PERSON),
        state_of(PLAIN),
        state_of(PLAIN, NUMBER, "12"),
        state_of(PLAIN, WORD),
    ]
    expected = [None, allowed(PERSON), None, allowed(NUMBER, "12"), allowed(WORD)]
    before = torch.full((len(order), WIDTH), -torch.inf)
    before[:, :VOCAB_SIZE] = logits_of(len(order))
    x = before.to(device, copy=True)
    masks = GrammarMasks(VOCAB_SIZE, torch.device(device))
    masks.apply(x, masks.fill([states[i] for i in order]), spare=torch.empty_like(x))
    for row, i in enumerate(order):
        left = expected[i]
        want = before[row] if left is None else before[row].masked_fill(~F.pad(left, (0, 192)), -torch.inf)
        assert torch.equal(x[row].cpu().view(torch.int32), want.view(torch.int32)), "to the bit"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in PARAMETER_SETS if not PARAMETER_SETS[name].allowed_token_ids]
)  # those have tests below
@pytest.mark.parametrize(("grammar", "text"), [(PERSON, "{"), (PERSON, '{"name": "an'), (NUMBER, "12345")])
def test_a_grammar_samples_as_if_the_logits_lacked_the_forbidden_tokens(name: str, grammar: Grammar, text: str) -> None:
    """Stop tokens are forbidden until the grammar allows the end: after a digit of a number, and not in a person."""
    params = msgspec.structs.replace(PARAMETER_SETS[name], min_tokens=0)
    logits, mask = logits_of(40), allowed(grammar, text)
    mask[list(params.stop_token_ids)] = grammar is NUMBER
    without = logits.masked_fill(~mask, -torch.inf)
    bound = [SampleRow(row, state_of(params, grammar, text, seed=row), 7) for row in range(40)]
    free = [SampleRow(row, state_of(params, None, text, seed=row), 7) for row in range(40)]
    sampler = Sampler(VOCAB_SIZE, CPU)
    sampled = [one.token_id for one in sampler.sample(logits, bound)]
    assert sampled == [one.token_id for one in sampler.sample(without, free)]
    assert len(set(sampled)) > 1


def test_a_grammar_and_the_allowed_tokens_allow_what_both_do() -> None:
    both = [int(token) for token in allowed(NUMBER).nonzero()[::2]]
    params = msgspec.structs.replace(PLAIN, allowed_token_ids=(*both, 5))
    rows = [SampleRow(row, state_of(params, NUMBER, seed=row), 3) for row in range(40)]
    logits = logits_of(40)
    sampled = [one.token_id for one in Sampler(VOCAB_SIZE, CPU).sample(logits, rows)]
    only = torch.full_like(logits, -torch.inf)
    only[:, both] = logits[:, both]
    free = [SampleRow(row, state_of(PLAIN, seed=row), 3) for row in range(40)]
    assert sampled == [one.token_id for one in Sampler(VOCAB_SIZE, CPU).sample(only, free)]


def test_a_grammar_without_any_allowed_token_fails_with_both_names() -> None:
    (outside,) = (~allowed(NUMBER)).nonzero()[0].tolist()
    state = state_of(msgspec.structs.replace(PLAIN, allowed_token_ids=(outside,)), NUMBER)
    (sampled,) = Sampler(VOCAB_SIZE, CPU).sample(logits_of(1), [SampleRow(0, state, 3)])
    assert not sampled.finite
    assert state.failure == "its grammar allows no token of allowed_token_ids here, not even the end"


def test_a_grammar_and_bad_words_of_one_token_allow_what_both_do() -> None:
    possible = [int(token) for token in allowed(NUMBER).nonzero()]
    bad, left = possible[::2], possible[1::2]
    params = msgspec.structs.replace(PLAIN, bad_word_ids=tuple((token,) for token in bad))
    rows = [SampleRow(row, state_of(params, NUMBER, seed=row), 3) for row in range(40)]
    sampled = [one.token_id for one in Sampler(VOCAB_SIZE, CPU).sample(logits_of(40), rows)]
    assert set(sampled) <= set(left)
    none_left = msgspec.structs.replace(PLAIN, bad_word_ids=tuple((token,) for token in possible))
    state = state_of(none_left, NUMBER)
    assert not Sampler(VOCAB_SIZE, CPU).sample(logits_of(1), [SampleRow(0, state, 3)])[0].finite
    assert state.failure == "its grammar allows no token except bad_words here, not even the end"


def test_nan_is_found_even_where_a_grammar_forbids_the_token() -> None:
    logits = logits_of(2)
    logits[0, ~allowed(NUMBER)] = torch.nan
    rows = [SampleRow(row, state_of(PLAIN, NUMBER), 3) for row in range(2)]
    assert [one.finite for one in Sampler(VOCAB_SIZE, CPU).sample(logits, rows)] == [False, True]


def test_fresh_siblings_share_a_lane_and_others_do_not() -> None:
    fresh = [SampleRow(0, state_of(PLAIN, PERSON, seed=i), 3) for i in range(4)]
    started = [SampleRow(i + 1, state_of(PLAIN, PERSON, '{"', seed=i), 5) for i in range(2)]
    (batch,) = plan_batches([*fresh, *started], range(6), widths=(VOCAB_SIZE,), max_lanes=9)
    assert [lane.choices for lane in batch.lanes] == [[0, 1, 2, 3], [4], [5]]


def test_without_grammars_there_are_no_masks() -> None:
    masks = GrammarMasks(VOCAB_SIZE, CPU).fill([state_of(PLAIN), state_of(PLAIN)])
    assert masks.lanes == [] and masks.bits.size == 0
