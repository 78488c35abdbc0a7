"""Settings of an engine that serves a tiny model. They need no torch, nor does a program that only starts engines."""

from pathlib import Path

from motet.settings.engine_config import EngineConfig

BLOCK_SIZE = 8
TINY = ("--served-model-name", "tiny", "--kv-cache-gb", "0.05", "--threads", "1", "--dtype", "float32")
"""Flags of a server with a tiny model."""


def engine_config(folder: Path, **changes: object) -> EngineConfig:
    """Returns settings for a tiny model; `changes` are fields of `EngineConfig`."""
    fields: dict[str, object] = {
        "model_path": str(folder),
        "model_name": "tiny",
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 512,
        "kv_cache_gb": 0.01,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 64,
        "num_threads": 1,
        **changes,
    }
    return EngineConfig(**fields)  # type: ignore[arg-type]
