"""A model is served only by a backend that computes the logits of transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from motet.engines.native import model
from motet.engines.native.build import build_parts
from motet.engines.native.checks import reference
from motet.engines.native.checks.reference import in_float32
from motet.engines.native.model import read_config
from motet.errors import UnsupportedModelError
from motet.settings.engine_config import EngineConfig
from tests.engines.native.drive import gb_of, make_core
from tests.tiny_architectures import save_tiny_architecture
from tests.tiny_engine import engine_config
from tests.tiny_models import FAMILIES, Reference, save_tiny_model

pytestmark = pytest.mark.slow


def config_of(folder: Path, dtype: str = "float32", **changes: object) -> EngineConfig:
    return engine_config(folder, dtype=dtype, kv_cache_gb=gb_of(256), **changes)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[reference.Comparison]:
    """The comparisons that were made."""
    found: list[reference.Comparison] = []
    original = reference.compare

    def compare(*args: Any, **kwargs: Any) -> reference.Comparison:
        found.append(original(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr("motet.engines.native.build.compare", compare)
    return found


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_as_close_as_the_rounding_of_float32(
    family: str, kernels: str, tmp_path: Path, compared: list[reference.Comparison]
) -> None:
    parts = build_parts(config_of(save_tiny_model(family, tmp_path), kernels=kernels))
    [found] = compared
    assert found.logits < 1e-5
    assert max(found.keys) < 1e-5
    assert parts.info.kernels_note == ""
    assert not parts.storage.keys.any(), "the comparison leaves no KV behind"


def test_a_difference_in_bfloat16_is_compared_with_that_of_transformers(
    tmp_path: Path, compared: list[reference.Comparison], monkeypatch: pytest.MonkeyPatch
) -> None:
    roundings: list[float] = []

    def rounding(*given: Any) -> float:
        roundings.append(reference.rounding(*given))
        return roundings[-1]

    monkeypatch.setattr("motet.engines.native.build.rounding", rounding)
    monkeypatch.setitem(reference.CLOSE, torch.bfloat16, 1e-6)
    build_parts(config_of(save_tiny_model("llama", tmp_path), "bfloat16", kernels="torch"))
    assert compared[0].logits < 2 * roundings[0] < 0.2


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"},
            "which is not a decoder of transformers",
        ),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "which has no attention"),
    ],
    ids=["encoder", "state"],
)
def test_models_without_a_kv_cache_are_refused_before_their_weights_are_read(
    config: dict[str, object], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=reason):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("DiffLlama", {}, "cannot be served: the logits differ from transformers' in float32 by .* from layer 0 on"),
        (
            "Lfm2",
            {"layer_types": ["conv", "full_attention"] * 2},
            "layers of the kind conv, whose state is not in",
        ),
    ],
)
def test_models_that_no_backend_computes_are_refused_with_the_reason(
    name: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """Attention sinks, the second call of attention in a layer, and states were ignored, and tokens were wrong."""
    folder = save_tiny_architecture(name, tmp_path, **fields)
    with pytest.raises(UnsupportedModelError, match=reason):
        make_core(folder)


def test_a_model_that_no_backend_computes_is_refused_with_the_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model("qwen3", tmp_path)
    original: Callable[..., Any] = reference.reference_pass

    def changed(loaded: nn.Module, **sizes: Any) -> Any:
        found = original(loaded, **sizes)
        loaded.get_submodule("model.layers.1.mlp.down_proj").weight.data.mul_(1.5)  # type: ignore[operator]
        return found

    monkeypatch.setattr("motet.engines.native.build.reference_pass", changed)
    with pytest.raises(UnsupportedModelError, match=r"the logits differ .*, from layer 1 on"):
        build_parts(config_of(folder, kernels="torch"))


@pytest.mark.parametrize("name", ["Gemma2", "Starcoder2", "GptOss", "GPT2"])
def test_weights_are_converted_for_a_moment_and_are_unchanged_afterwards(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models have products with and without biases, experts, and layers that are not modules of torch. Blocks of
    1,000 weights are not a divisor of any product."""
    monkeypatch.setattr(reference, "BLOCK_WEIGHTS", 1000)
    folder = save_tiny_architecture(name, tmp_path)
    loaded = model.load_model(folder, model.read_config(folder), dtype=torch.bfloat16, device=torch.device("cpu"))
    before = {name: (each.data_ptr(), each.dtype) for name, each in loaded.named_parameters()}
    found = reference.reference_pass(loaded, num_tokens=20, vocab_size=320)
    assert {name: (each.data_ptr(), each.dtype) for name, each in loaded.named_parameters()} == before
    with pytest.raises(ZeroDivisionError), in_float32(loaded):
        raise ZeroDivisionError
    assert loaded.dtype == torch.bfloat16
    assert all("forward" not in vars(module) for module in loaded.modules())
    rounded = Reference(folder).model
    for each, other in zip(rounded.parameters(), loaded.parameters(), strict=True):
        each.data = other.float()
    with torch.inference_mode():
        expected = rounded(torch.tensor([found.tokens])).logits[0]
    assert reference.difference_of(found.logits, expected) < 1e-3
