"""RoPE whose angles depend on the length of a sequence in transformers.

LongRoPE (Phi 3 to 4) has short factors for sequences up to the original length of the model, and long factors for
longer sequences. transformers selects by the length of each call, so the cached keys of a sequence that exceeds the
original length become invalid. As in vLLM, an engine selects once, by its maximum length, for all positions: its
config gets a type of RoPE that has only the selected factors.
"""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from motet.errors import ModelLoadError, UnsupportedModelError
from motet.log import cut

logger = logging.getLogger(__name__)

DYNAMIC, LONG_ROPE = "dynamic", "longrope"
ORIGINAL = "original_max_position_embeddings"
SELECTED = "{}_with_{}_factors"
"""Name of the type of RoPE with the short or the long factors of LongRoPE."""
MAX_VALUE_CHARS = 100
"""Maximum length of a value of a config in messages."""


def check_rope(config: PreTrainedConfig, folder: Path) -> None:
    """Raises UnsupportedModelError for the type `dynamic`, and ModelLoadError for LongRoPE without an original
    length."""
    if any(parameters.get("rope_type") == DYNAMIC for parameters in _all_parameters(config)):
        raise UnsupportedModelError(
            f"{folder} uses rope type {DYNAMIC!r}, whose angles depend on the length of each sequence: cached keys "
            "become invalid when a sequence grows, and other sequences of a batch change its tokens"
        )
    for parameters in _long_rope(config):
        original = parameters.get(ORIGINAL)
        if type(original) is not int or original < 2:
            raise ModelLoadError(
                f"{folder / 'config.json'}: {ORIGINAL} is {cut(repr(original), MAX_VALUE_CHARS)}, and must be a number "
                "from 2 on"
            )


def default_length(config: PreTrainedConfig, maximum: int) -> int:
    """Returns the maximum length of an engine without a setting: `maximum`, the length of the model. With LongRoPE, it
    is the original length, because the long factors make answers to short prompts worse."""
    lengths: list[int] = [parameters[ORIGINAL] for parameters in _long_rope(config)]
    return min([maximum, *lengths])


def select_factors(config: PreTrainedConfig, max_model_len: int) -> None:
    """Replaces LongRoPE in a config by the factors for this length. Does nothing to other types of RoPE."""
    for parameters in _long_rope(config):
        which = "long" if max_model_len > parameters[ORIGINAL] else "short"
        logger.info(
            "LongRoPE: all positions use the %s factors, because the maximum length is %d and the model's original "
            "length is %d",
            which,
            max_model_len,
            parameters[ORIGINAL],
        )
        parameters["rope_type"] = SELECTED.format(LONG_ROPE, which)
        if (scale := parameters.get(f"{which}_mscale")) is not None:  # PhiMoE
            parameters.update(short_mscale=scale, long_mscale=scale)


def _all_parameters(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """Yields the parameters of RoPE, of each kind of layers if the kinds differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    yield parameters
    yield from (value for value in parameters.values() if isinstance(value, dict))


def _long_rope(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Returns the parameters of LongRoPE."""
    return [parameters for parameters in _all_parameters(config) if parameters.get("rope_type") == LONG_ROPE]


def _selected_factors(
    config: PreTrainedConfig,
    device: torch.device | None = None,
    *,
    which: str,
    layer_type: str | None = None,
    **_: object,
) -> tuple[torch.Tensor, float]:
    """Computes the frequencies and the scale of a type of `SELECTED`, for sequences of any length."""
    parameters: dict[str, Any] = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    length = parameters[ORIGINAL] + (which == "long")
    return ROPE_INIT_FUNCTIONS[LONG_ROPE](config, device, seq_len=length, layer_type=layer_type)


for _which in ("short", "long"):
    ROPE_INIT_FUNCTIONS[SELECTED.format(LONG_ROPE, _which)] = partial(_selected_factors, which=_which)
