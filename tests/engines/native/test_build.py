"""What cannot be built ends with the error that says why."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from motet.engines.native.build import build_parts
from motet.errors import KVMemoryError, ModelLoadError, UnsupportedModelError
from tests.engines.native.drive import engine_config

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
