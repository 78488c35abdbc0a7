"""A token is a function of its row's bits, the parameters, the seed and the position. It is the same bit for bit alone,
at any place of any batch, with 1 or 2 threads, and whichever path finds it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from motet.engines.native.sample.filters import TorchFilters
from motet.engines.native.sample.lanes import Sampled
from motet.engines.native.sample.sampler import Sampler
from motet.types import LogprobsMode, SamplingParams
from tests.engines.native.sample.reference import Past
from tests.property_settings import examples

CPU = torch.device("cpu")
VOCAB = 5003  # several blocks and a ragged one; seven rows keep two threads busy

LOGITS = {
    (dtype, spread): spread * torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0)).to(dtype)
    for dtype in (torch.float32, torch.bfloat16)
    for spread in (0.05, 1.0, 4.0)
}
SAMPLER = Sampler(VOCAB, CPU)
WITH_TORCH = [
    Sampler(VOCAB, CPU, filters=TorchFilters(VOCAB, widths=widths))
    for widths in ((), (1, 2, 3, 5, 8, 13), (64, 100, 4096))
]
tokens = st.integers(0, VOCAB - 1)
params = st.builds(
    SamplingParams,
    max_tokens=st.just(99),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.999]),
    top_k=st.sampled_from([0, 0, 1, 50, 64, 65, 700, VOCAB, 10**6]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    logit_bias=st.sampled_from([{}, {}, {3: 2.5, VOCAB - 1: -4.0}]),
    min_tokens=st.sampled_from([0, 0, 3]),
    allowed_token_ids=st.sampled_from([(), (), tuple(range(0, VOCAB, 3))]),
    logprobs=st.sampled_from([None, None, 0, 3]),
    logprob_token_ids=st.sampled_from([(), (), (5, 4000)]),
    logprobs_mode=st.sampled_from(LogprobsMode),
)
seeds = st.integers(0, 2**64 - 1)
prompts = st.lists(tokens, min_size=1, max_size=20)
answers = st.lists(tokens, max_size=8)


@dataclass(frozen=True)
class SampledRow:
    logits_row: int
    params: SamplingParams
    past: Past


groups = st.builds(  # choices that share a row, parameters and the prompt
    lambda row, p, prompt, several: [
        SampledRow(row, p, Past(seed, prompt, output_tokens)) for seed, output_tokens in several
    ],
    st.integers(0, 5),
    params,
    prompts,
    st.lists(st.tuples(seeds, answers), min_size=1, max_size=4),
)
batches = st.lists(groups, min_size=1, max_size=5).map(
    lambda several: [choice for group in several for choice in group]
)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sample(logits: torch.Tensor, batch: list[SampledRow], sampler: Sampler | None = None) -> list[Sampled]:
    return (sampler or SAMPLER).sample(
        logits, [choice.past.sample_row(choice.logits_row, choice.params) for choice in batch]
    )


@pytest.mark.slow
@examples(25)
@given(batch=batches, kind=st.sampled_from(sorted(LOGITS, key=str)), data=st.data())
def test_a_token_does_not_depend_on_its_batch_or_the_number_of_threads(
    batch: list[SampledRow], kind: tuple[torch.dtype, float], data: st.DataObject
) -> None:
    logits = LOGITS[kind]
    with threads(2):
        together = sample(logits, batch)
        alone = [
            sample(logits[choice.logits_row : choice.logits_row + 1], [SampledRow(0, choice.params, choice.past)])[0]
            for choice in batch
        ]
        order = data.draw(st.permutations(range(len(batch))))
        shuffled = sample(logits, [batch[place] for place in order])
    with threads(1):
        single_threaded = sample(logits, batch)
    assert together == alone
    assert together == single_threaded
    assert [together[place] for place in order] == shuffled


@pytest.mark.slow
@examples(25)
@given(batch=batches, kind=st.sampled_from(sorted(LOGITS, key=str)))
def test_a_token_does_not_depend_on_the_filter_or_the_number_of_candidates(
    batch: list[SampledRow], kind: tuple[torch.dtype, float]
) -> None:
    logits = LOGITS[kind]
    usual = sample(logits, batch)
    by_torch = [sample(logits, batch, sampler) for sampler in WITH_TORCH]
    assert by_torch[0] == by_torch[1] == by_torch[2]
    for one, other in zip(usual, by_torch[0], strict=True):  # log-probabilities are rounded in other places
        assert (one.token_id, one.finite) == (other.token_id, other.finite)
        if one.logprob != other.logprob:
            assert one.logprob is not None
            assert other.logprob is not None
            assert one.logprob.rank == other.logprob.rank
            assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-5)
            assert dict(one.logprob.top) == pytest.approx(dict(other.logprob.top), abs=1e-5)


WIDE = 49_152
NEUTRAL: dict[str, dict[str, object]] = {
    "log-probabilities": {"logprobs": 3, "logprob_token_ids": (5, 4000)},
    "processed log-probabilities": {"logprobs": 1, "logprobs_mode": LogprobsMode.PROCESSED},
    "a bias of 0": {"logit_bias": {5: 0.0, WIDE - 1: -0.0}},
    "all tokens allowed": {"allowed_token_ids": tuple(range(WIDE))},
    "top-k of all tokens": {"top_k": WIDE},
    "prompt log-probabilities": {"prompt_logprobs": 2},
    "a minimum without an end": {"min_tokens": 3, "ignore_eos": True},
    "all of them": {"logprobs": 0, "logprobs_mode": LogprobsMode.PROCESSED, "logit_bias": {5: 0.0}, "top_k": WIDE},
}


@cache
def plain_tokens(sampler: Sampler, first: int) -> list[int]:
    """Returns a token for each of 500 seeds, from plain parameters."""
    return tokens_of(sampler, first, SamplingParams(max_tokens=9))


def tokens_of(sampler: Sampler, first: int, used: SamplingParams) -> list[int]:
    logits = 3 * torch.randn(8, WIDE, generator=torch.Generator().manual_seed(0))
    rows = [SampledRow(seed % 8, used, Past(seed)) for seed in range(first, first + 500)]
    return [one.token_id for one in sample(logits, rows, sampler)]


WIDE_SAMPLERS = {"compiled": Sampler(WIDE, CPU), "torch": Sampler(WIDE, CPU, filters=TorchFilters(WIDE))}


@pytest.mark.parametrize(
    ("filters", "num_tokens"),
    [("torch", 500), ("compiled", 500), pytest.param("compiled", 12_000, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("fields", NEUTRAL.values(), ids=NEUTRAL)
def test_a_token_does_not_depend_on_what_is_reported_or_on_neutral_values(
    filters: str, num_tokens: int, fields: dict[str, object]
) -> None:
    """Edits that changed nothing, and log-probabilities after them, used to take another path, which rounded weights
    in another way: one token of 4,000 differed, and the rest of its answer with it."""
    used = SamplingParams(max_tokens=9, **fields)  # type: ignore[arg-type]
    for first in range(0, num_tokens, 500):
        sampler = WIDE_SAMPLERS[filters]
        assert tokens_of(sampler, first, used) == plain_tokens(sampler, first)


@pytest.mark.parametrize("vocab", [49_152, 50_257, 151_936])
def test_rows_of_a_real_vocabulary_are_the_same_alone_and_together(vocab: int) -> None:
    logits = (3 * torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab))).bfloat16()
    kinds = [
        SamplingParams(max_tokens=9, logprobs=5),
        SamplingParams(max_tokens=9, temperature=0.8, logprobs=5),
        SamplingParams(max_tokens=9, top_p=0.9, logprobs=5),
        SamplingParams(max_tokens=9, min_p=0.01, temperature=1.3, logprobs=5),
    ]
    rows = [Past(row, prompt=(7,)).sample_row(row % 4, kinds[row // 4]) for row in range(16)]
    with threads(2):
        together = Sampler(vocab, CPU).sample(logits, rows)
    with threads(1):
        alone = [
            Sampler(vocab, CPU).sample(
                logits[row % 4 : row % 4 + 1], [Past(row, prompt=(7,)).sample_row(0, kinds[row // 4])]
            )[0]
            for row in range(16)
        ]
    assert together == alone
