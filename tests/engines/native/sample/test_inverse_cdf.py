import pytest
import torch

from motet.engines.native.sample.inverse_cdf import BLOCK, draw_dense, invert

BELOW_ONE = 1.0 - 2.0**-53


def test_a_fraction_finds_the_step_it_falls_on_and_what_is_left_of_it() -> None:
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
def test_the_only_token_with_weight_is_drawn_by_every_uniform(place: int) -> None:
    weights = torch.zeros(1, 4 * BLOCK)
    weights[0, place] = 1e-30
    uniform = torch.tensor([0.0, 1e-300, 0.5, BELOW_ONE], dtype=torch.float64)
    drawn = draw_dense(weights, torch.zeros(4, dtype=torch.int64), uniform)
    assert drawn.tolist() == [place] * 4


def test_a_token_of_weight_zero_is_never_drawn() -> None:
    torch.manual_seed(0)
    weights = torch.rand(1, 4 * BLOCK) * (torch.rand(1, 4 * BLOCK) < 0.1)
    edges = weights[0].double().cumsum(0) / weights.double().sum()
    uniform = torch.cat([edges, edges.nextafter(torch.zeros(1).double()), torch.tensor([0.0, BELOW_ONE]).double()])
    drawn = draw_dense(weights, torch.zeros(len(uniform), dtype=torch.int64), uniform.clamp(0.0, BELOW_ONE))
    assert (weights[0, drawn] > 0).all()


def test_the_dense_draw_is_the_inverse_of_the_whole_cumulative_sum() -> None:
    torch.manual_seed(1)
    weights = torch.rand(3, 8 * BLOCK) ** 8
    lanes = torch.arange(3).repeat(5000)
    uniform = torch.rand(len(lanes), dtype=torch.float64)
    cdf = weights.double().cumsum(-1)
    expected = torch.searchsorted(cdf[lanes], (uniform * cdf[lanes, -1])[:, None], right=True).squeeze(1)
    differing = (draw_dense(weights, lanes, uniform) != expected).sum()
    assert differing <= 3  # only where the uniform falls within float32 rounding of a step


def test_weights_that_are_not_numbers_give_an_id_inside_the_row() -> None:
    drawn = draw_dense(
        torch.full((1, 2 * BLOCK), torch.nan), torch.zeros(1, dtype=torch.int64), torch.tensor([0.5]).double()
    )
    assert 0 <= int(drawn) < 2 * BLOCK
