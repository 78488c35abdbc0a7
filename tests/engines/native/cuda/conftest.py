"""Runs these tests with one thread, because with several threads, synchronisation would take longer than computing."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
