"""The distance from float32 is measured as defined, and int8 keeps the default model close to it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from bench.accuracy import accuracy, compare
from motet.models.smollm2 import Smollm2
from motet.settings.server_config import cache_folder, environment


def test_equal_logits_have_no_distance() -> None:
    windows, logits = torch.randint(7, (2, 8)), torch.randn(2, 8, 7)
    found = accuracy(windows, logits + 3.0, logits)
    assert found.mean_kl == pytest.approx(0, abs=1e-6) and found.other_first == 0


def test_divergence_and_perplexity_follow_their_definitions() -> None:
    truth = torch.tensor([[[0.5, 0.25, 0.25]] * 2]).log()
    logits = torch.tensor([[[0.25, 0.5, 0.25]] * 2]).log()
    found = accuracy(torch.tensor([[0, 1]]), logits, truth)
    assert found.perplexity == pytest.approx(2.0), "token 1 had a probability of one half"
    assert found.mean_kl == pytest.approx(0.25 * torch.tensor(2.0).log().item())
    assert found.other_first == 1.0


@pytest.mark.real
@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.long
def test_int8_keeps_the_default_model_close_to_float32() -> None:
    """Checks entire models; `tests/engines/native/cpu/test_int8.py` compares every int8 product with its definition."""
    default = Smollm2(cache_folder(environment()))
    if not default.folder.is_dir():
        pytest.skip("the default model is not here: motet models pull")
    text = (Path(__file__).parents[2] / "README.md").read_text()
    tokens = AutoTokenizer.from_pretrained(default.folder)(text)["input_ids"]
    found = compare(default.folder, torch.tensor(tokens[:256]).view(1, 256))
    assert found["bf16"].mean_kl < found["bf16 by torch"].mean_kl < found["int8"].mean_kl < 0.015
    assert found["int8"].perplexity == pytest.approx(found["float32"].perplexity, rel=0.02)
