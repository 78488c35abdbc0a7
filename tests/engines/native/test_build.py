"""What cannot be built ends with the error that says why."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from motet.engines.native.build import build_parts
from motet.errors import KVMemoryError, ModelLoadError, UnsupportedModelError
from tests.engines.native.drive import engine_config
from tests.tiny_models import save_tiny_model

Tiny = Callable[[str], Path]


def with_config(source: Path, folder: Path, **changes: object) -> Path:
    """A folder with the config of `source`, changed; no weights."""
    config = json.loads((source / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize("changes", [{"num_attention_heads": 7}, {"hidden_size": "wide"}, {"vocab_size": None}])
def test_sizes_that_make_no_model_are_a_broken_config(tiny: Tiny, tmp_path: Path, changes: dict[str, object]) -> None:
    folder = with_config(tiny("llama"), tmp_path, **changes)
    with pytest.raises(ModelLoadError, match="cannot read the model config"):
        build_parts(engine_config(folder))


def test_an_architecture_unknown_to_transformers_too_is_answered_with_the_known_ones(
    tiny: Tiny, tmp_path: Path
) -> None:
    folder = with_config(tiny("llama"), tmp_path, model_type="novel", architectures=["NovelForCausalLM"])
    with pytest.raises(UnsupportedModelError, match=r"NovelForCausalLM; supported are .*LlamaForCausalLM"):
        build_parts(engine_config(folder))


def test_a_cache_larger_than_the_machine_names_its_flag(tiny: Tiny) -> None:
    with pytest.raises(KVMemoryError, match="--kv-cache-gb"):
        build_parts(engine_config(tiny("llama"), kv_cache_gb=1e6))


def test_an_unknown_scaling_of_positions_is_not_taken_for_a_known_one(tiny: Tiny, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        build_parts(engine_config(with_config(tiny("llama"), tmp_path, rope_parameters=rope)))


def test_weights_that_are_none_are_a_broken_model(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelLoadError, match="cannot load the model"):
        build_parts(engine_config(folder))


def test_a_weight_that_is_missing_is_not_made_up(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="lack 1 tensors"):
        build_parts(engine_config(folder))
