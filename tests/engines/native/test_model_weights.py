"""Numbers that are not finite are found in every dtype and at every place."""

import pytest
import torch

from motet.engines.native.model_weights import is_finite


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_numbers_are_finite_unless_one_is_nan_or_infinite(dtype: torch.dtype, size: int) -> None:
    numbers = torch.randn(size).to(dtype)
    for finite in (0.0, -0.0, torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).tiny):
        numbers[size // 2] = finite
        assert is_finite(numbers)
    for bad in (torch.nan, -torch.nan, torch.inf, -torch.inf):
        for place in {0, size // 2, size - 1}:
            with_bad = numbers.clone()
            with_bad[place] = bad
            assert not is_finite(with_bad)


def test_any_shape_can_be_checked() -> None:
    assert is_finite(torch.zeros(0)) and is_finite(torch.tensor(1.5)) and is_finite(torch.ones(2, 3, 4).transpose(0, 2))
