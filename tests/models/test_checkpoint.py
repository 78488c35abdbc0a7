"""Checkpoints: the digest of the same tensors is the same, wherever they are."""

from pathlib import Path

import torch
from safetensors.torch import save

from motet.models.checkpoint import Checkpoint, checkpoint_files
from motet.models.safetensors_header import check_safetensors
from motet.models.weight_digest import weights_digest
from tests.memory_files import memory_file_of

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}


def test_a_checkpoint_in_memory_has_the_digest_of_a_folder_with_the_same_tensors(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(save(TENSORS))
    pieces = [memory_file_of(save({name: tensor})) for name, tensor in TENSORS.items()]
    checkpoint = Checkpoint.of_memory(pieces)
    assert checkpoint_files(checkpoint.paths) == [piece.path for piece in pieces]
    assert check_safetensors(pieces[0].path)[0].keys() == {"a"}
    assert weights_digest(checkpoint.paths, None) == weights_digest([tmp_path], None)
    assert (checkpoint.name, Checkpoint.of(tmp_path).name) == ("memory", str(tmp_path))
    checkpoint.close()
    assert not any(piece.path.exists() for piece in pieces)
