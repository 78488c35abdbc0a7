"""The best tokens of a row in order, and the token that a uniform number selects."""

import numpy as np
import pytest
import torch

from motet.engines.native.sample.candidates import BLOCK, invert, sample_dense, top_tokens, top_tokens_and_num_exact


def sorted_ids(x: torch.Tensor) -> torch.Tensor:
    values = x.double().numpy()
    ids = np.broadcast_to(np.arange(values.shape[1]), values.shape)
    return torch.from_numpy(np.lexsort((ids, -values), axis=-1))


@pytest.mark.parametrize("width", [64, 256, 4096, 10_240])
@pytest.mark.parametrize("spread", [3.0, 0.02])
def test_top_tokens_are_the_first_k_of_the_full_order(width: int, spread: float) -> None:
    """Nearly every value of bf16 logits with a small spread belongs to many tokens."""
    torch.manual_seed(width)
    x = (5 + spread * torch.randn(3, width)).bfloat16().float()
    expected = sorted_ids(x)
    for k in (1, 2, 5, 20, 64, 100, 511, 2048, width):
        if k <= width:
            assert torch.equal(top_tokens(x, k), expected[:, :k]), k


@pytest.mark.parametrize("spread", [3.0, 0.02])
@pytest.mark.parametrize("k", [1, 64, 65, 700, 2000])
def test_exact_top_tokens_are_the_first_of_the_full_order(k: int, spread: float) -> None:
    torch.manual_seed(k)
    x = (5 + spread * torch.randn(20, 2048)).bfloat16().float()
    x[:, 2000:] = -torch.inf
    expected = sorted_ids(x)
    ids, num_exact = top_tokens_and_num_exact(x, k, vocab_size=2000)
    assert ids.shape == (20, k)
    for row in range(20):
        assert torch.equal(ids[row, : num_exact[row]], expected[row, : num_exact[row]])
    if k in {1, 64, 2000}:
        assert (num_exact == k).all()
    else:
        assert (num_exact < k).all()
        assert (x.gather(1, ids) > x.gather(1, ids[:, -1:])).sum(-1).tolist() == num_exact.squeeze(1).tolist()


def test_equal_logits_are_ordered_by_id() -> None:
    assert top_tokens(torch.zeros(1, 512), 4).tolist() == [[0, 1, 2, 3]]


def test_the_two_zeros_are_equal() -> None:
    x = torch.full((1, 256), -1.0)
    x[0, 100], x[0, 200] = -0.0, 0.0
    assert top_tokens(x, 2).tolist() == [[100, 200]]


def test_negative_infinite_and_tiny_logits_keep_their_order() -> None:
    x = torch.full((1, 64), -torch.inf)
    x[0, :7] = torch.tensor([-3.0e38, 1e-42, -1e-42, 0.0, -0.5, 3.0e38, -1.0])
    assert top_tokens(x, 8).tolist() == [[5, 1, 3, 2, 4, 6, 0, 7]]


def test_the_order_of_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 4096).bfloat16().float()
    together = top_tokens(x, 64)
    for row in range(9):
        assert torch.equal(top_tokens(x[row : row + 1], 64), together[row : row + 1])


def test_zero_top_tokens_can_be_requested() -> None:
    assert top_tokens(torch.zeros(2, 256), 0).shape == (2, 0)


BELOW_ONE = 1.0 - 2.0**-53


def test_a_fraction_finds_its_step_and_the_rest_within_that_step() -> None:
    weights = torch.tensor([[1.0, 0.0, 2.0, 1.0]], dtype=torch.float64).expand(6, -1)
    fraction = torch.tensor([0.0, 0.125, 0.25, 0.5, 0.75, BELOW_ONE], dtype=torch.float64)
    index, rest = invert(weights, fraction)
    assert index.tolist() == [0, 0, 2, 2, 3, 3]
    assert rest.tolist() == pytest.approx([0.0, 0.5, 0.0, 0.5, 0.0, 1.0])


def test_a_fraction_rounded_up_to_one_finds_the_last_index_with_weight() -> None:
    weights = torch.tensor([[0.3, 0.0, 0.1, 0.0, 0.0]], dtype=torch.float64).expand(2, -1)
    index, _ = invert(weights, torch.tensor([1.0, 1.0 + 1e-9], dtype=torch.float64))
    assert index.tolist() == [2, 2]


def test_weights_need_not_sum_to_one() -> None:
    weights = torch.tensor([[3e-9, 1e-9], [3e9, 1e9]], dtype=torch.float64)
    index, _ = invert(weights, torch.tensor([0.74, 0.76], dtype=torch.float64))
    assert index.tolist() == [0, 1]


@pytest.mark.parametrize("place", [0, 1, 255, 256, 700, 1023])
def test_every_uniform_selects_the_only_token_with_weight(place: int) -> None:
    weights = torch.zeros(1, 4 * BLOCK)
    weights[0, place] = 1e-30
    uniform = torch.tensor([0.0, 1e-300, 0.5, BELOW_ONE], dtype=torch.float64)
    sampled = sample_dense(weights, torch.zeros(4, dtype=torch.int64), uniform)
    assert sampled.tolist() == [place] * 4


def test_a_token_of_weight_zero_is_never_sampled() -> None:
    torch.manual_seed(0)
    weights = torch.rand(1, 4 * BLOCK) * (torch.rand(1, 4 * BLOCK) < 0.1)
    edges = weights[0].double().cumsum(0) / weights.double().sum()
    uniform = torch.cat([edges, edges.nextafter(torch.zeros(1).double()), torch.tensor([0.0, BELOW_ONE]).double()])
    sampled = sample_dense(weights, torch.zeros(len(uniform), dtype=torch.int64), uniform.clamp(0.0, BELOW_ONE))
    assert (weights[0, sampled] > 0).all()


@pytest.mark.slow
def test_dense_sampling_inverts_the_complete_cumulative_sum() -> None:
    torch.manual_seed(1)
    weights = torch.rand(3, 8 * BLOCK) ** 8
    lanes = torch.arange(3).repeat(5000)
    uniform = torch.rand(len(lanes), dtype=torch.float64)
    cdf = weights.double().cumsum(-1)
    expected = torch.searchsorted(cdf[lanes], (uniform * cdf[lanes, -1])[:, None], right=True).squeeze(1)
    differing = (sample_dense(weights, lanes, uniform) != expected).sum()
    assert differing <= 3  # only where the uniform falls within float32 rounding of a step


def test_weights_that_are_not_numbers_give_an_id_inside_the_row() -> None:
    weights, lanes = torch.full((1, 2 * BLOCK), torch.nan), torch.zeros(1, dtype=torch.int64)
    sampled = sample_dense(weights, lanes, torch.tensor([0.5]).double())
    assert 0 <= int(sampled) < 2 * BLOCK
