import numpy as np
import pytest
import torch

from motet.engines.native.sample.leaders import leaders, leaders_surely


def sorted_ids(x: torch.Tensor) -> torch.Tensor:
    values = x.double().numpy()
    ids = np.broadcast_to(np.arange(values.shape[1]), values.shape)
    return torch.from_numpy(np.lexsort((ids, -values), axis=-1))


@pytest.mark.parametrize("width", [64, 256, 4096, 10_240])
@pytest.mark.parametrize("spread", [3.0, 0.02])
def test_leaders_are_the_front_of_the_full_order_for_every_k(width: int, spread: float) -> None:
    """In bf16 with a small spread nearly every value is shared by many tokens."""
    torch.manual_seed(width)
    x = (5 + spread * torch.randn(3, width)).bfloat16().float()
    expected = sorted_ids(x)
    for k in (1, 2, 5, 20, 64, 100, 511, 2048, width):
        if k <= width:
            assert torch.equal(leaders(x, k), expected[:, :k]), k


@pytest.mark.parametrize("spread", [3.0, 0.02])
@pytest.mark.parametrize("k", [1, 64, 65, 700, 2000])
def test_leaders_said_to_be_sure_are_the_front_of_the_full_order(k: int, spread: float) -> None:
    torch.manual_seed(k)
    x = (5 + spread * torch.randn(20, 2048)).bfloat16().float()
    x[:, 2000:] = -torch.inf
    expected = sorted_ids(x)
    ids, sure = leaders_surely(x, k, 2000)
    assert ids.shape == (20, k)
    for row in range(20):
        assert torch.equal(ids[row, : sure[row]], expected[row, : sure[row]])
    if k in {1, 64, 2000}:
        assert (sure == k).all()
    else:
        assert (sure < k).all()
        assert (x.gather(1, ids) > x.gather(1, ids[:, -1:])).sum(-1).tolist() == sure.squeeze(1).tolist()


def test_equal_logits_go_by_lower_id() -> None:
    assert leaders(torch.zeros(1, 512), 4).tolist() == [[0, 1, 2, 3]]


def test_the_two_zeros_are_equal() -> None:
    x = torch.full((1, 256), -1.0)
    x[0, 100], x[0, 200] = -0.0, 0.0
    assert leaders(x, 2).tolist() == [[100, 200]]


def test_negative_infinite_and_tiny_logits_keep_their_order() -> None:
    x = torch.full((1, 64), -torch.inf)
    x[0, :7] = torch.tensor([-3.0e38, 1e-42, -1e-42, 0.0, -0.5, 3.0e38, -1.0])
    assert leaders(x, 8).tolist() == [[5, 1, 3, 2, 4, 6, 0, 7]]


def test_the_order_of_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 4096).bfloat16().float()
    together = leaders(x, 64)
    for row in range(9):
        assert torch.equal(leaders(x[row : row + 1], 64), together[row : row + 1])


def test_no_leaders_asked_for_none_given() -> None:
    assert leaders(torch.zeros(2, 256), 0).shape == (2, 0)
