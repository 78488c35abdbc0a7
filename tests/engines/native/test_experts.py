"""Mixtures of experts in the compiled kernels, apart from what `test_architectures` tests for all architectures."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replace_fields
from safetensors.torch import load_file, save_file

from bench.accuracy import prompt_logits
from motet.engines.native.build import Parts, build_parts
from motet.engines.native.checks.reference import difference_of
from motet.engines.native.compiled_kernels import KINDS
from motet.engines.native.cpu.cpu_runner import CpuRunner
from motet.engines.native.cpu.packed_weights import PackedModel
from motet.engines.native.model import load_model, read_config
from motet.errors import RequestError
from motet.ids import ModelName
from motet.models.checkpoint import CheckpointKind
from tests.engines.native.adapter_files import ATTENTION, merge, save_adapter
from tests.engines.native.drive import gb_of, group, make_core, prompt_of, run
from tests.kernels import kernels_of
from tests.tiny_architectures import save_tiny_architecture
from tests.tiny_engine import engine_config
from tests.tiny_models import Reference

pytestmark = [pytest.mark.slow, pytest.mark.kernels]

PROMPT = list(prompt_of(40))
FILE = "model.safetensors"
DIFFERENT = ["Mixtral", "Qwen2Moe", "Ernie4_5_Moe", "Glm4Moe", "GptOss"]
"""Softmax, a shared expert with a factor, corrections of softmax and of sigmoid with groups, and clamped experts with
biases and transposed weights."""
Save = Callable[..., Path]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Returns the folder of a tiny model, which is made once."""
    folders: dict[tuple[str, int], Path] = {}

    def folder(name: str, seed: int = 3) -> Path:
        if (name, seed) not in folders:
            folders[name, seed] = save_tiny_architecture(name, tmp_path_factory.mktemp(name), seed=seed)
        return folders[name, seed]

    return folder


def built(folder: Path, **numbers: Any) -> Parts:
    return build_parts(engine_config(folder, kv_cache_gb=gb_of(256), **numbers))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DIFFERENT)
def test_each_kind_of_kernels_computes_experts(name: str, kind: str, save: Save) -> None:
    kernels, folder = kernels_of(kind), save(name)
    parts = built(folder, dtype="float32", kernels="torch")
    model = load_model(folder, read_config(folder), dtype=torch.float32, device=torch.device("cpu"))
    packed = PackedModel(model, parts.storage, max_positions=512, kernels=kernels)
    runner = CpuRunner(packed, parts.storage, num_threads=3, kernels=kernels)
    found = prompt_logits(replace(parts, runner=runner), PROMPT)
    assert difference_of(found, Reference(folder).logits(PROMPT)) < 1e-5


NUMBERS = [
    {"dtype": "bfloat16"},
    {"dtype": "float32"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "float32", "kernels": "torch"},
]


@pytest.mark.parametrize("numbers", NUMBERS, ids=lambda numbers: "-".join(numbers.values()))
@pytest.mark.parametrize("name", DIFFERENT)
def test_new_weights_are_those_of_an_engine_that_was_started_with_them(
    name: str, numbers: dict[str, str], save: Save, tmp_path: Path
) -> None:
    """First with the names of published checkpoints, one tensor for each expert, then with the names of parameters,
    which trainers send: corrections of routers are not among them in some families, and do not change."""
    parts, expected = (built(save(name, seed), **numbers) for seed in (3, 4))
    before = parts.weights.checksums()
    prepared = parts.weights.prepare(CheckpointKind.FILES, [save(name, 4)])
    assert prepared.prepared.complete
    prepared.staged.apply()
    assert parts.weights.checksums() == expected.weights.checksums() != before

    model = load_model(save(name, 3), read_config(save(name, 3)), dtype=torch.float32, device=torch.device("cpu"))
    parameters = dict(model.named_parameters())
    save_file({path: each.detach().clone() for path, each in parameters.items()}, tmp_path / FILE)
    parts.weights.prepare(CheckpointKind.FILES, [tmp_path]).staged.apply()
    after = parts.weights.checksums()
    assert {path: after[path] for path in parameters} == {path: before[path] for path in parameters}
    assert prompt_logits(parts, PROMPT).isfinite().all()


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ("missing", r"tensor model.layers.1.mlp.experts.3.up_proj.weight: it is missing, and other parts of"),
        ("twice", r"tensor model.layers.1.mlp.experts.gate_up_proj: parts of it are in the checkpoint too"),
        ("shape", r"tensor model.layers.1.mlp.experts.3.up_proj.weight: its shape is \[5, 5\], and the model's is"),
    ],
)
def test_parts_that_are_not_the_tensors_of_all_experts_are_refused(
    changed: str, error: str, save: Save, tmp_path: Path
) -> None:
    parts, tensors = built(save("Qwen3Moe"), dtype="bfloat16"), load_file(save("Qwen3Moe") / FILE)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    if changed == "missing":
        del tensors[name]
    elif changed == "twice":
        tensors["model.layers.1.mlp.experts.gate_up_proj"] = torch.zeros(16, 64, 64)
    else:
        tensors[name] = torch.zeros(5, 5)
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(RequestError, match=error):
        parts.weights.prepare(CheckpointKind.FILES, [tmp_path])


def test_layers_that_predict_several_tokens_are_not_used(save: Save, tmp_path: Path) -> None:
    """Published checkpoints of GLM 4.5 Air have such a layer after the 46 layers of the model."""
    folder = save("Glm4Moe")
    save_file(load_file(folder / FILE) | {"model.layers.46.eh_proj.weight": torch.ones(64, 128)}, tmp_path / FILE)
    parts = built(folder, dtype="bfloat16")
    assert parts.weights.prepare(CheckpointKind.FILES, [tmp_path]).prepared.complete
    save_file({"model.layers.47.eh_proj.weight": torch.ones(64, 128)}, tmp_path / FILE)
    with pytest.raises(RequestError, match="the model has no such tensor"):
        parts.weights.prepare(CheckpointKind.FILES, [tmp_path])


@pytest.mark.parametrize("name", ["Qwen2Moe", "Dots1"])
def test_weights_of_zeros_select_some_experts(name: str, save: Save) -> None:
    """All experts are equally good then."""
    parts = built(save(name), dtype="bfloat16")
    parts.weights.prepare(CheckpointKind.ZEROS).staged.apply()
    assert not prompt_logits(parts, PROMPT).any()


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_an_adapter_of_attention_generates_as_the_merged_model(kernels: str, save: Save, tmp_path: Path) -> None:
    folder = save("Qwen2Moe")
    adapter = save_adapter(folder, tmp_path / "adapter", targets=ATTENTION)
    merged = merge(folder, adapter, tmp_path / "merged")
    core = make_core(folder, kernels=kernels, adapters=[f"a={adapter}"])
    request = replace_fields(group("g", PROMPT, temperature=0.0), model=ModelName("a"))
    assert run(core, [request])["g"].tokens[0] == Reference(merged).greedy(PROMPT, 20)
