"""Adapters that cannot be used are refused with the file and the tensor or the field; all others match PEFT's rules."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.engines.native.adapters.low_rank import AdapterTensors
from motet.engines.native.adapters.peft_config import read_peft_config
from motet.engines.native.adapters.peft_files import read_adapter
from motet.errors import RequestError
from tests.engines.native.adapter_files import ALL, linear_shapes, load_order, memory_order, save_adapter

TENSORS = "adapter_model.safetensors"
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


class Layers:
    """An `AdapterMaker` of a model folder, in any dtype."""

    def __init__(self, model: Path, dtype: torch.dtype = torch.float32) -> None:
        self.linears = {**linear_shapes(model), "lm_head": (320, 64)}
        self.dtype = dtype

    def unsupported_reason(self, linear: str) -> str | None:
        return "adapters of the output embedding are not implemented" if linear == "lm_head" else None

    def make(self, parts: object) -> object:
        return parts


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


def read(model: Path, folder: Path, *, max_rank: int = 64, dtype: torch.dtype = torch.float32) -> AdapterTensors:
    return read_adapter(
        load_order("a", folder), Layers(model, dtype), max_rank=max_rank, served=("tiny", "/models/tiny-1")
    )


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces tensors of layer 0's q_proj, by `A` and `B`, or others by their names; None removes a tensor."""
    found = load_file(folder / TENSORS)
    for name, tensor in tensors.items():
        full = f"{Q}{name}.weight" if name in "AB" else name
        found.pop(full, None)
        if tensor is not None:
            found[full] = tensor
    save_file(found, folder / TENSORS)


CONFIG_FAULTS: dict[str, dict[str, Any]] = {
    "peft_type is 'LOHA'": {"peft_type": "LOHA"},
    "use_dora is True": {"use_dora": True},
    "modules_to_save is": {"modules_to_save": ["lm_head"]},
    "trainable_token_indices is": {"trainable_token_indices": [1]},
    "target_parameters is": {"target_parameters": ["experts.weight"]},
    "lora_bias is True": {"lora_bias": True},
    "bias is 'all'": {"bias": "all"},
    "layer_replication is": {"layer_replication": [[0, 2]]},
    "some_new_method is": {"some_new_method": {"a": 1}},
    "init_lora_weights is 'pissa_niter_4'.*path_initial_model": {"init_lora_weights": "pissa_niter_4"},
    "r is 0": {"r": 0},
    "r is '4'": {"r": "4"},
    "lora_alpha is None": {"lora_alpha": None},
    "lora_alpha is inf": {"lora_alpha": float("inf")},
    "target_modules is None": {"target_modules": None},
    "target_modules is 3": {"target_modules": 3},
    "'\\(' is not a regular expression": {"target_modules": "("},
    "rank_pattern is": {"rank_pattern": {"q_proj": -1}},
    "layers_to_transform is": {"layers_to_transform": "1"},
}


@pytest.mark.parametrize("message", CONFIG_FAULTS)
def test_fields_that_are_not_implemented_are_refused_by_name(message: str) -> None:
    with pytest.raises(RequestError, match=f"config.json: {message}") as refused:
        read_peft_config(CONFIG | CONFIG_FAULTS[message], "config.json")
    assert (refused.value.param, refused.value.code) == ("lora_path", "invalid_adapter")


Fault = Callable[[Path], object]
FAULTS: dict[str, Fault] = {
    "adapter_config.json is missing": lambda folder: (folder / "adapter_config.json").unlink(),
    "adapter_config.json is broken": lambda folder: (folder / "adapter_config.json").write_text("{"),
    "adapter_model.safetensors is missing": lambda folder: (folder / TENSORS).unlink(),
    "save_pretrained": lambda folder: (folder / TENSORS).rename(folder / "adapter_model.bin"),
    "has .* bytes, but its header": lambda folder: (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-9]),
    f"{Q}A.weight: its shape is .4, 65.": lambda folder: change(folder, A=torch.zeros(4, 65)),
    f"{Q}B.weight: its shape is .128, 5.": lambda folder: change(folder, B=torch.zeros(128, 5)),
    f"{Q}B.weight: it has numbers that are NaN": lambda folder: change(folder, B=torch.full((128, 4), torch.nan)),
    f"{Q}B.weight: .*too large for float16": lambda folder: change(folder, B=torch.full((128, 4), 4e4)),
    f"{Q}A.weight: its dtype is I32": lambda folder: change(folder, A=torch.zeros(4, 64, dtype=torch.int32)),
    "model.layers.0.self_attn.q_proj has no tensor lora_B": lambda folder: change(folder, B=None),
    "tensors of model.layers.0.self_attn.q_proj, .*missing": lambda folder: change(folder, A=None, B=None),
    "layers.9.*no such linear layer": lambda folder: change(
        folder, **{f"{Q}{side}.weight".replace("layers.0", "layers.9"): torch.zeros(4, 64) for side in "AB"}
    ),
    "lora_magnitude_vector: it is DoRA": lambda folder: change(folder, **{f"{Q}magnitude_vector": torch.zeros(128)}),
    "lora_embedding_A: it is an adapter of embeddings": lambda folder: change(
        folder, **{"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 320)}
    ),
    "lm_head.weight: it is a part of modules_to_save": lambda folder: change(
        folder, **{"base_model.model.lm_head.weight": torch.zeros(320, 64)}
    ),
    "does not name this layer in target_modules": lambda folder: change(
        folder,
        **{
            "base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64),
            "base_model.model.lm_head.lora_B.weight": torch.zeros(320, 4),
        },
    ),
}


@pytest.mark.parametrize("message", FAULTS)
def test_an_error_names_the_file_and_the_tensor(message: str, model: Path, tmp_path: Path) -> None:
    folder = save_adapter(model, tmp_path)
    FAULTS[message](folder)
    with pytest.raises(RequestError, match=message) as refused:
        read(model, folder, dtype=torch.float16)
    assert str(folder) in refused.value.message or "config" in message


def test_a_rank_above_the_maximum_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"its rank is 9, and the maximum is 8 .--max-adapter-rank"):
        read(model, save_adapter(model, tmp_path, rank=9), max_rank=8)


def test_ranks_scalings_and_layers_are_those_of_peft() -> None:
    """The expected values are PEFT 0.21's."""
    fields = CONFIG | {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"^model.*q_proj": 3}}
    config = read_peft_config(fields | {"use_rslora": True}, "x")
    first, second = "model.layers.1.self_attn.q_proj", "model.layers.11.self_attn.q_proj"
    assert [config.rank_of(name) for name in (first, second)] == [2, 4]
    assert [config.scaling_of(name) for name in (first, second)] == [3 / 2**0.5, 3 / 2]
    assert read_peft_config(CONFIG, "x").scaling_of(first) == 2.0

    def named(**changes: Any) -> list[str]:
        every = [f"model.layers.{number}.{name}" for number in (0, 1) for name in ("self_attn.q_proj", "mlp.up_proj")]
        found = read_peft_config(CONFIG | changes, "x")
        return [name.removeprefix("model.layers.") for name in every if found.changes(name)]

    assert named() == ["0.self_attn.q_proj", "1.self_attn.q_proj"]
    assert len(named(target_modules="all-linear")) == 4
    assert named(target_modules=r".*\.1\..*_proj") == ["1.self_attn.q_proj", "1.mlp.up_proj"]
    assert named(target_modules=["q_proj", "up_proj"], exclude_modules=["q_proj"]) == ["0.mlp.up_proj", "1.mlp.up_proj"]
    assert named(layers_to_transform=1) == ["1.self_attn.q_proj"]
    assert named(layers_to_transform=[0], layers_pattern="layers") == ["0.self_attn.q_proj"]
    assert named(target_modules=["proj"]) == []


@pytest.mark.slow
def test_the_digest_depends_on_numbers_and_scaling_only(model: Path, tmp_path: Path) -> None:
    adapters: dict[str, dict[str, Any]] = {
        "first": {},
        "renamed": {"base_model_name_or_path": "other"},
        "scaled": {"lora_alpha": 9},
        "seed": {"seed": 1},
        "fewer": {"targets": ALL[:-1]},
    }
    digests = {
        name: read(model, save_adapter(model, tmp_path / name, **fields)).digest for name, fields in adapters.items()
    }
    assert digests["first"] == digests["renamed"] and len(set(digests.values())) == 4


def test_a_file_in_memory_is_read_with_the_configuration_of_the_order(model: Path, tmp_path: Path) -> None:
    """`named_parameters` of a model with an adapter has the adapter's name in the names."""
    folder = save_adapter(model, tmp_path)
    expected = read(model, folder)
    tensors = load_file(folder / TENSORS)
    save_file(
        {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()}, folder / TENSORS
    )
    fields = json.loads((folder / "adapter_config.json").read_text())
    order = memory_order("a", folder / TENSORS, fields)
    assert read_adapter(order, Layers(model), max_rank=8, served=()).digest == expected.digest
    with pytest.raises(RequestError, match=r"adapter_config.json is broken"):
        read_adapter(msgspec.structs.replace(order, config="["), Layers(model), max_rank=8, served=())


def test_an_adapter_of_another_base_model_causes_a_warning(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The base model is known by its name on the hub and by its folder."""
    for base in ("org/tiny", "/other/tiny-1", "TINY", ""):
        read(model, save_adapter(model, tmp_path, base_model_name_or_path=base))
    assert caplog.text == ""
    read(model, save_adapter(model, tmp_path, base_model_name_or_path="org/large"))
    assert "the adapter a was trained for org/large, and tiny is served" in caplog.text
