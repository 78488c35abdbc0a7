"""A model folder for a GGUF file, in Motet's cache: the config and the tokenizer from the file's metadata, and a link
to the file.

The metadata states less than a `config.json`. A key that has no counterpart there, such as one of RoPE scaling, is
refused: without it the answers would be wrong. A folder with the file, and with the original model's `config.json`
and tokenizer, needs no metadata.

A separate process (`motet.models.convert`) reads the metadata, because it needs torch."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

from motet.errors import ModelLoadError, UnsupportedModelError
from motet.log import cut
from motet.models.gguf_files.gguf_header import GgufHeader, read_gguf
from motet.models.progress import SILENT, Progress
from motet.settings.server_config import environment
from motet.system.machine import torch_environ

FOLDER = "gguf-1"
"""Name of the folder in the cache that contains the folders of GGUF files. Changed if their content changes."""
LINK = "model.gguf"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Architectures whose metadata has all that their config needs."""
READ = frozenset(
    {
        *("context_length", "block_count", "feed_forward_length", "embedding_length", "vocab_size"),
        *("rope.dimension_count", "rope.freq_base"),
        *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
        *("attention.key_length", "attention.value_length"),
    }
)
"""Keys of an architecture that become fields of the config."""
MAX_VALUE_CHARS = 100


def gguf_folder(file: Path, cache: Path, *, progress: Progress = SILENT) -> Path:
    """Returns the folder of a file, and makes it if it does not exist. Raises UnsupportedModelError for metadata that a
    config cannot express, and ModelLoadError."""
    file = file.resolve()
    check_metadata(file, read_gguf(file))
    folder = _folder_of(file, cache)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            if not folder.is_dir():
                with progress.stage(f"reading the config and the tokenizer of {file.name} (once)"):
                    _make(file, folder)
    except OSError as exc:
        raise ModelLoadError(f"{folder.parent}: the config of {file.name} cannot be stored there: {exc}") from exc
    return folder


def made_folder(file: Path, cache: Path) -> Path | None:
    """Returns the folder of a file; None if `gguf_folder` has not made it yet."""
    folder = _folder_of(file.resolve(), cache)
    return folder if folder.is_dir() else None


def _folder_of(file: Path, cache: Path) -> Path:
    stat = file.stat()
    key = hashlib.sha256(json.dumps([str(file), stat.st_size, stat.st_mtime_ns]).encode()).hexdigest()[:32]
    return cache / FOLDER / key


def check_metadata(file: Path, header: GgufHeader) -> None:
    """Raises UnsupportedModelError unless a config can express the metadata."""
    architecture = header.metadata.get("general.architecture")
    advice = f"put the model's config.json and tokenizer.json into a folder with {file.name}, and serve the folder"
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file}: general.architecture is {_shown(architecture)}, and a config can be made for "
            f"{', '.join(ARCHITECTURES)}: {advice}"
        )
    prefix = f"{architecture}."
    for key, value in header.metadata.items():
        scaling = key == f"{prefix}rope.scaling.type" and value == "none"
        if key.startswith(prefix) and key.removeprefix(prefix) not in READ and not scaling:
            raise UnsupportedModelError(
                f"{file}: {cut(key, MAX_VALUE_CHARS)} is {_shown(value)}, which cannot be read: {advice}"
            )
    if "rope_freqs.weight" in header.tensors:
        raise UnsupportedModelError(f"{file} has RoPE factors (rope_freqs.weight), which cannot be read: {advice}")


def _make(file: Path, folder: Path) -> None:
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        command = [sys.executable, "-m", "motet.models.convert", "--only-metadata", str(file), str(partial)]
        environ = torch_environ(environment(), partial)
        result = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False, env=environ
        )
        if result.returncode:
            lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
            raise ModelLoadError(
                f"{file}: its metadata cannot be read: {lines[-1] if lines else 'no reason was given'}"
            )
        (partial / LINK).symlink_to(file)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _shown(value: object) -> str:
    return cut(repr(value), MAX_VALUE_CHARS)
