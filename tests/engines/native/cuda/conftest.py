"""These tests use one thread: several would wait for each other longer than they compute."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
