"""The fingerprint: operators are checked for equal results, and different weights have different fingerprints."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.engines.native.build import build_parts
from motet.engines.native.checks.fingerprint import (
    fingerprint,
    linears_agree,
    operators_agree,
    prompts_agree,
    trunks_agree,
)
from tests.tiny_engine import engine_config

Tiny = Callable[[str], Path]
MODEL = torch.nn.Sequential(torch.nn.Linear(1536, 576, bias=False), torch.nn.Linear(576, 960, bias=False))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_rows_agree_and_the_fingerprint_says_so(dtype: torch.dtype) -> None:
    model = MODEL.to(dtype)
    assert linears_agree(model) and prompts_agree(64, dtype) and trunks_agree(64, dtype)
    cpu = torch.device("cpu")
    same = operators_agree(model, head_dim=64, dtype=dtype, device=cpu)
    text = fingerprint("torch-2", same, dtype=dtype, device=cpu, model="0123456789abcdef" * 2)
    assert text.endswith(f"_{str(dtype).removeprefix('torch.')}-same")
    assert "_model-0123456789abcdef_torch-2_" in text


def test_the_probe_finds_that_rows_without_padding_differ() -> None:
    counts = (1, 2, 3, 5, 6, 7)
    assert not linears_agree(MODEL.to(torch.float32), counts=counts), (
        "without this difference padding would not be needed"
    )


@pytest.mark.slow
def test_different_weights_or_configurations_have_different_fingerprints_and_no_kv(tiny: Tiny, tmp_path: Path) -> None:
    """The bug: two servers with different weights had equal fingerprints, so a group moved from one to the other."""
    original = build_parts(engine_config(tiny("llama")))
    copied = shutil.copytree(tiny("llama"), tmp_path / "copied")
    copy = build_parts(engine_config(copied))
    assert copy.info.fingerprint == original.info.fingerprint and copy.facts == original.facts

    weights = load_file(copied / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][5, 7] += 0.5
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    retrained = build_parts(engine_config(copied))

    shutil.copy(tiny("llama") / "model.safetensors", copied)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    configured = build_parts(engine_config(copied))

    three = (original, retrained, configured)
    assert len({parts.info.fingerprint for parts in three}) == len({parts.info.model_digest for parts in three}) == 3
    assert all(parts.info.fingerprint.endswith("-same") for parts in three)
    assert [fact.split()[0] for fact in original.facts.differences(retrained.facts)] == ["model_digest"]
    assert [fact.split()[0] for fact in original.facts.differences(configured.facts)] == ["model_digest"]


@pytest.mark.slow
def test_a_model_keeps_its_digest_in_another_dtype(tiny: Tiny) -> None:
    float32, bfloat16 = (build_parts(engine_config(tiny("llama"), dtype=name)) for name in ("float32", "bfloat16"))
    assert float32.info.model_digest == float32.facts.model_digest == bfloat16.facts.model_digest
    assert float32.info.fingerprint != bfloat16.info.fingerprint
