"""The same engine on CUDA: greedy output in float32 equals `transformers.generate` on the same device."""

from pathlib import Path

import pytest
import torch

from tests.engines.native.drive import group, make_core, prompt_of, run
from tests.tiny_models import FAMILIES, Reference, assert_greedy_equal, save_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

NEW_TOKENS = 60
SIZES = {5: 1, 64: 5, 33: 2, 130: 3}
"""Prompt length: choices."""


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_groups_with_preemption_and_chunks_equal_generate(family: str, tmp_path: Path) -> None:
    folder = save_tiny_model(family, tmp_path)
    reference = Reference(folder, "cuda:0")
    core = make_core(folder, device="cuda:0", blocks=70, max_model_len=256, budget=48, max_num_seqs=24)
    requests = [
        group(f"{length}", prompt_of(length, length), n=n, max_tokens=NEW_TOKENS, top_k=1)
        for length, n in SIZES.items()
    ]
    outcomes = run(core, requests, stagger=3)
    assert core.counters.preemptions > 0
    for length, n in SIZES.items():
        prompt = prompt_of(length, length)
        expected = reference.greedy(prompt, NEW_TOKENS)
        assert sorted(outcomes[f"{length}"].tokens) == list(range(n))
        for tokens in outcomes[f"{length}"].tokens.values():
            assert_greedy_equal(reference, prompt, tokens, expected)


def test_a_seed_gives_the_same_answer_twice_and_another_seed_another(tmp_path: Path) -> None:
    core = make_core(save_tiny_model("llama", tmp_path), device="cuda:0", dtype="bfloat16")
    first, again = (run(core, [group("g", prompt_of(83), n=8, seed=3)])["g"].tokens for _ in range(2))
    assert first == again
    assert len({tuple(tokens) for tokens in first.values()}) == 8
