"""Writes PEFT folders with random adapters of a model, and the models into which they are merged."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from motet.engine_orders import LoadAdapter
from motet.ids import ModelName
from motet.models.checkpoint import CheckpointKind

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
WEIGHTS = "model.safetensors"


def linear_shapes(model: Path) -> dict[str, tuple[int, int]]:
    """Returns outputs and inputs of the linear layers of a model folder's decoder layers, by name."""
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))  # type: ignore[no-untyped-call]
    linears = {name: module for name, module in made.named_modules() if isinstance(module, torch.nn.Linear)}
    return {name: (one.out_features, one.in_features) for name, one in linears.items() if ".layers." in name}


def save_adapter(
    model: Path,
    folder: Path,
    *,
    rank: int = 4,
    targets: Sequence[str] = ALL,
    seed: int = 0,
    size: float = 0.3,
    dtype: torch.dtype = torch.float32,
    **config: object,
) -> Path:
    """Writes an adapter of the model. `targets`: last names of the layers it changes, empty for all. `size`: size of
    the numbers of B. `config`: fields of adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    fields = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "bias": "none",
        "target_modules": [*targets] or "all-linear",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    tensors: dict[str, Tensor] = {}
    for name, (outputs, inputs) in linear_shapes(model).items():
        if not targets or name.split(".")[-1] in targets:
            a = torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)
            b = torch.randn(outputs, rank, generator=generator) * size
            tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype)
            tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge(model: Path, adapter: Path, folder: Path) -> Path:
    """Writes the model with the weights W + scaling * B A, as PEFT merges them."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    fields = json.loads((adapter / "adapter_config.json").read_text())
    weights, parts = load_file(model / WEIGHTS), load_file(adapter / "adapter_model.safetensors")
    scaling = fields["lora_alpha"] / (math.sqrt(fields["r"]) if fields.get("use_rslora") else fields["r"])
    for name, b in parts.items():
        if ".lora_B." in name:
            weight = weights[name.removeprefix("base_model.model.").replace(".lora_B", "")]
            weight += scaling * b.float() @ parts[name.replace("lora_B", "lora_A")].float()
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def load_order(name: str, path: Path, **fields: object) -> LoadAdapter:
    return LoadAdapter(ModelName(name), CheckpointKind.FILES, str(path), root=str(path), **fields)  # type: ignore[arg-type]


def memory_order(name: str, path: Path, config: Mapping[str, object]) -> LoadAdapter:
    return LoadAdapter(ModelName(name), CheckpointKind.MEMORY, str(path), config=json.dumps(config))
