import math

import msgspec
import numpy as np
import pytest
import torch

from motet.engines.native.sample.lanes import SampleRow
from motet.engines.native.sample.sampler import Sampler
from motet.engines.native.sample.state import ChoiceSampling, PromptTokens
from motet.engines.native.sample.top_logprobs import prompt_logprobs
from motet.grammar.compiled_grammar import fill_masks, mask_words
from motet.types import LogprobsMode, SamplingParams, TokenLogprob
from tests.engines.native.grammars import EOS_IDS, NUMBER, matcher_of
from tests.engines.native.sample.parameter_sets import PARAMETER_SETS
from tests.engines.native.sample.reference import Past, edited, weights
from tests.tiny_models import VOCAB_SIZE

CPU = torch.device("cpu")
VOCAB = 3000


def logits_of(rows: int, vocab: int = VOCAB) -> torch.Tensor:
    return (3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))).bfloat16()


def check_against_float64(row: torch.Tensor, got: TokenLogprob, k: int) -> None:
    values = row.double()
    logprobs = torch.log_softmax(values, -1)
    assert got.logprob == pytest.approx(float(logprobs[got.token_id]), abs=2e-6)
    assert got.rank == 1 + int((values > values[got.token_id]).sum())
    best = sorted(range(len(values)), key=lambda token_id: (-float(values[token_id]), token_id))[:k]
    assert [token_id for token_id, _ in got.top] == best
    assert [logprob for _, logprob in got.top] == pytest.approx([float(logprobs[i]) for i in best], abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 1, 5, 20, 100])
def test_prompt_logprobs_equal_the_float64_log_softmax(k: int) -> None:
    logits = logits_of(12)
    targets = [int(token_id) for token_id in torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(1))]
    scored = prompt_logprobs(logits, targets, k=k)
    assert [score.token_id for score in scored] == targets
    for row, score in zip(logits, scored, strict=True):
        check_against_float64(row, score, k)


def test_sampled_tokens_are_scored_by_raw_logits_with_any_parameters() -> None:
    logits = logits_of(4)
    params = SamplingParams(max_tokens=9, temperature=0.5, top_k=9, logit_bias={17: 90.0}, logprobs=5)
    rows = [Past(seed, output_tokens=(4,)).sample_row(seed % 4, params) for seed in range(8)]
    for place, sampled in enumerate(Sampler(VOCAB, CPU).sample(logits, rows)):
        assert sampled.token_id == 17
        assert sampled.logprob is not None
        assert sampled.logprob.rank > 1
        check_against_float64(logits[place % 4], sampled.logprob, 5)


def test_each_choice_gets_the_requested_number_of_top_tokens() -> None:
    logits = logits_of(1)
    requested = [None, 0, 3, 20, None, 1]
    rows = [Past(7).sample_row(0, SamplingParams(max_tokens=9, logprobs=k)) for k in requested]
    sampled = Sampler(VOCAB, CPU).sample(logits, rows)
    assert [None if s.logprob is None else len(s.logprob.top) for s in sampled] == requested
    assert len({s.logprob.logprob for s in sampled if s.logprob is not None}) == 1


def processed(params: SamplingParams, logits: torch.Tensor, past: Past) -> torch.Tensor:
    """Returns the log-probabilities [vocabulary] of the distribution from which a token is sampled, in float64; a
    greedy choice has neither temperature nor filters."""
    row = logits.double().numpy()
    if params.greedy:
        return torch.log_softmax(torch.from_numpy(edited(row, params, past)), -1)
    return torch.from_numpy(weights(row, params, past)).log()


@pytest.mark.parametrize("name", PARAMETER_SETS)
def test_processed_log_probabilities_are_those_of_the_sampled_distribution(name: str) -> None:
    named = (3, 7, 120)
    changed = {"logprobs": 4, "logprobs_mode": LogprobsMode.PROCESSED}
    params = msgspec.structs.replace(PARAMETER_SETS[name], **changed)
    with_named = msgspec.structs.replace(params, logprobs=0, logprob_token_ids=named)
    logits = 2 * torch.randn(2, 1000, generator=torch.Generator().manual_seed(5))
    pasts = [Past(seed, prompt=range(100, 150), output_tokens=(120, 7, 7, 900)) for seed in range(6)]
    raw = msgspec.structs.replace(params, logprobs_mode=LogprobsMode.RAW)
    rows = [past.sample_row(past.seed % 2, one) for past in pasts for one in (params, raw, with_named)]
    sampled = Sampler(1000, CPU).sample(logits, rows)
    for place, one in enumerate(sampled[::3]):
        exact = processed(params, logits[place % 2], pasts[place])
        assert one.logprob is not None
        assert one.logprob.logprob > -200
        assert one.logprob.logprob == pytest.approx(float(exact[one.token_id]), abs=2e-5)
        assert one.logprob.rank == 1 + int((exact > exact[one.token_id]).sum())
        kept = [pair for pair in one.logprob.top if pair[1] > -math.inf]
        assert len(kept) == min(4, int((exact > -math.inf).sum()))
        assert [value for _, value in kept] == pytest.approx([float(exact[id]) for id, _ in kept], abs=2e-5)
        named_logprob = sampled[3 * place + 2].logprob
        assert named_logprob is not None
        assert [id for id, _ in named_logprob.top] == list(dict.fromkeys((one.token_id, *named)))
        assert [value for _, value in named_logprob.top] == pytest.approx(
            [float(exact[id]) for id, _ in named_logprob.top], abs=2e-5
        )
    alone = [Sampler(1000, CPU).sample(logits, [row])[0] for row in rows]
    assert alone == sampled
    assert [one.token_id for one in sampled[::3]] == [one.token_id for one in sampled[1::3]]


def test_choices_of_one_row_have_their_own_ranks_next_to_another_group() -> None:
    """There were as many choices as lanes, but not one in each lane, and the second choice of a group was ranked in the
    row of the other group."""
    modes = (LogprobsMode.PROCESSED, LogprobsMode.RAW)
    params = [SamplingParams(max_tokens=9, temperature=2.0, logprobs=0, logprobs_mode=mode) for mode in modes]
    logits = logits_of(2)
    rows = [Past(seed).sample_row(0, params[0]) for seed in (1, 2)] + [Past(3).sample_row(1, params[1])]
    together = Sampler(VOCAB, CPU).sample(logits, rows)
    assert together == [Sampler(VOCAB, CPU).sample(logits, [row])[0] for row in rows]


def test_named_tokens_are_listed_after_the_likeliest_ones() -> None:
    logits = logits_of(2)
    exact = torch.log_softmax(logits.double(), -1)
    params = SamplingParams(max_tokens=9, logprobs=3, logprob_token_ids=(7, 2999))
    (one,) = Sampler(VOCAB, CPU).sample(logits, [Past(1).sample_row(1, params)])
    assert one.logprob is not None
    scored = {one.token_id: one.logprob, 40: prompt_logprobs(logits[1:], [40], k=3, named=(7, 2999))[0]}
    for token, entry in scored.items():
        listed = [*exact[1].topk(3).indices.tolist(), token, 7, 2999]
        assert [id for id, _ in entry.top] == list(dict.fromkeys(listed))
        assert [value for _, value in entry.top] == pytest.approx(
            [float(exact[1][id]) for id, _ in entry.top], abs=2e-6
        )


def test_processed_log_probabilities_know_the_grammar() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.7, logprobs=3, logprobs_mode=LogprobsMode.PROCESSED)
    sampler, bits = Sampler(VOCAB_SIZE, CPU), np.zeros((1, mask_words(VOCAB_SIZE)), np.int32)
    fill_masks([matcher_of(NUMBER)], bits)
    allowed = torch.from_numpy(np.unpackbits(bits.view(np.uint8), bitorder="little")[:VOCAB_SIZE].astype(bool))
    logits = 3 * torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(6))
    state = ChoiceSampling(params, seed=4, prompt=PromptTokens((5,)), eos_token_ids=EOS_IDS, matcher=matcher_of(NUMBER))
    (one,) = sampler.sample(logits, [SampleRow(0, state, 1)])
    exact = torch.log_softmax(logits[0].double().masked_fill(~allowed, -math.inf) / 0.7, -1)
    assert one.logprob is not None
    assert one.logprob.logprob == pytest.approx(float(exact[one.token_id]), abs=2e-5)


def test_named_tokens_are_scored_after_the_sampled_token_and_as_alone() -> None:
    logits = logits_of(3)
    greedy = SamplingParams(max_tokens=9, temperature=0.0)
    requested: list[tuple[int, ...]] = [(7, 2999, 0), (), (5,), (int(logits[1].argmax()), 4, 4)]
    params = [SamplingParams(max_tokens=9, logprobs=0 if ids else 3, logprob_token_ids=ids) for ids in requested]
    rows = [Past(seed).sample_row(row, one) for seed, (row, one) in enumerate(zip((0, 1, 2, 1), params, strict=True))]
    rows[3] = Past(3).sample_row(
        1, SamplingParams(max_tokens=9, temperature=0.0, logprobs=0, logprob_token_ids=requested[3])
    )
    rows.append(Past(4).sample_row(0, greedy))
    sampled = Sampler(VOCAB, CPU).sample(logits, rows)
    for row, ids, one in zip((0, 1, 2, 1), requested, sampled, strict=False):
        assert one.logprob is not None
        exact = torch.log_softmax(logits[row].double(), -1)
        listed = [id for id, _ in one.logprob.top]
        assert listed == (list(dict.fromkeys((one.token_id, *ids))) if ids else listed[:3])
        assert [value for _, value in one.logprob.top] == pytest.approx([float(exact[id]) for id in listed], abs=2e-6)
    assert sampled[4].logprob is None
    assert [Sampler(VOCAB, CPU).sample(logits, [row])[0] for row in rows] == sampled


def test_equal_logits_share_a_rank_and_the_lower_id_comes_first() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [40, 30]] = 2.0
    [score] = prompt_logprobs(logits, [2500], k=4)
    assert score.rank == 3
    assert [token_id for token_id, _ in score.top] == [30, 40, 0, 1]
    [score] = prompt_logprobs(logits, [40], k=0)
    assert score.rank == 1
    assert score.top == ()


def test_there_are_no_more_top_tokens_than_the_vocabulary_has() -> None:
    [score] = prompt_logprobs(torch.tensor([[0.0, 1.0, -torch.inf]]), [0], k=20)
    assert [token_id for token_id, _ in score.top] == [1, 0, 2]
    assert score.top[2][1] == -torch.inf


def test_many_rows_are_scored_piece_by_piece_with_the_same_bits() -> None:
    """The scratch memory holds 682 rows of this vocabulary."""
    logits = logits_of(700)
    targets = list(range(700))
    scored = prompt_logprobs(logits, targets, k=2)
    for row in (0, 1, 681, 682, 699):
        assert prompt_logprobs(logits[row : row + 1], [targets[row]], k=2) == [scored[row]]


@pytest.mark.kernels
@pytest.mark.parametrize(("vocab", "k", "named"), [(VOCAB, 0, ()), (VOCAB, 5, (7, 2999)), (4096, 1, ()), (40, 60, ())])
def test_the_compiled_kernels_score_given_tokens_like_torchs_operators(
    vocab: int, k: int, named: tuple[int, ...]
) -> None:
    logits, targets, sampler = logits_of(9, vocab), [5 * row % vocab for row in range(9)], Sampler(vocab, CPU)
    scored, expected = (score(logits, targets, k=k, named=named) for score in (sampler.score, prompt_logprobs))
    for one, other in zip(scored, expected, strict=True):
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert [id for id, _ in one.top] == [id for id, _ in other.top]
        values, others = ([each.logprob, *(value for _, value in each.top)] for each in (one, other))
        assert values == pytest.approx(others, abs=2e-6)
    logits[3, 8] = math.nan
    broken = sampler.score(logits, targets, k=k, named=named)
    assert broken[:3] == scored[:3] and broken[4:] == scored[4:], "a row does not depend on the others"
    assert math.isnan(broken[3].logprob)


def test_no_rows_give_no_scores() -> None:
    assert prompt_logprobs(logits_of(1)[:0], [], k=3) == []


def test_padding_is_never_among_the_top_tokens() -> None:
    [score] = prompt_logprobs(torch.full((1, 10), -5.0), [9], k=10)
    assert [token_id for token_id, _ in score.top] == list(range(10))
    assert score.logprob == pytest.approx(-2.302585, abs=1e-6)
