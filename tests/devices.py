"""The devices on which a test runs: the CPU always, the first GPU where there is one (`pytest -m gpu`)."""

import pytest
import torch

GPU = "cuda:0"
ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.timeout(120),  # kernels are compiled at first use
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
)
DEVICES = ("cpu", pytest.param(GPU, marks=ON_GPU))
