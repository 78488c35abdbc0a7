"""Loads a Hugging Face model with Motet's attention, and reads the sizes that the engine needs from its config."""

import copy
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from motet.engines.native.model_weights import NOT_FINITE, is_finite
from motet.engines.native.quantized.dequantized import DequantizedCheckpoint
from motet.engines.native.quantized.detect import CONFIG_FIELDS
from motet.engines.native.quantized.fp8 import ACTIVATIONS
from motet.engines.native.quantized.stored_tensors import FLOATS, LogicalTensor, plain_tensors
from motet.engines.native.rope import check_rope, default_length
from motet.engines.native.step.padded_experts import EXPERTS_NAME
from motet.engines.native.step.run import ATTENTION_NAME
from motet.errors import ConfigError, ModelLoadError, MotetError, UnsupportedModelError
from motet.log import cut
from motet.models.file_reading import FileReading
from motet.models.folder import read_object, weight_files
from motet.models.weight_digest import read_headers
from motet.sampling_defaults import GENERATION_CONFIG

logger = logging.getLogger(__name__)

ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers whose only memory of previous tokens is the KV cache."""

TEXT_PART_NAME = re.compile(r"(model\.)?language_model\.")
"""Start of the names of a decoder's tensors in a checkpoint that also has parts for images."""
TEXT_PART = {
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?language_model\.(model\.)?": "model.",
}
"""The names that these tensors have in the decoder alone, by the patterns of their names."""

MAX_SIZE = 2**31
"""Maximum of a size or a token id in a config."""
UNUSED, MTP = {*ACTIVATIONS, "masked_bias"}, re.compile(r"(^|\.)mtp")
MAX_MISSING_RATIO = 2
"""Maximum ratio of a model's weights to those in its files. Tied weights are stored once."""
MAX_VALUE_CHARS, MAX_REASON_CHARS = 100, 1000
"""Maximum length of a value of a config, and of an error of transformers, in messages."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, from which the KV cache and the limits of the engine are computed."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    """Length of the model's context."""
    default_length: int
    """Maximum length of an engine without `--max-model-len`."""
    eos_token_ids: tuple[int, ...]


def read_config(folder: Path) -> PreTrainedConfig:
    """Returns the model's config. Raises ModelLoadError or UnsupportedModelError, before any weight is read."""
    try:
        # from_pretrained does not name the architecture if transformers does not know the model type.
        fields = PreTrainedConfig.get_config_dict(folder)[0]
        architectures = fields.get("architectures") or []
        own_code = "; its code is in the folder (auto_map), and Motet does not run it" if "auto_map" in fields else ""
        has_text_part = isinstance(fields.get("text_config"), dict)
        if not (has_text_part or set(architectures) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())):
            raise UnsupportedModelError(
                f"{folder} contains {', '.join(architectures) or 'no architecture'}, which is not a decoder of "
                f"transformers {transformers.__version__}{own_code}"
            )
        if own_code and fields.get("model_type") not in CONFIG_MAPPING:
            raise UnsupportedModelError(
                f"{folder} has the model type {_shown(fields.get('model_type'))}, which transformers "
                f"{transformers.__version__} does not have{own_code}"
            )
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if has_text_part and (config := _text_part(config)).model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise UnsupportedModelError(
                f"{folder} contains {', '.join(architectures)}, whose text part {config.model_type} is not a decoder "
                f"of transformers {transformers.__version__}"
            )
        if (reason := _without_kv_cache(config)) is not None:
            raise UnsupportedModelError(f"{folder} contains {', '.join(architectures)}, {reason}")
        check_rope(config, folder)
    except MotetError:
        raise
    except Exception as exc:  # transformers does not check the types of all values
        raise ModelLoadError(f"cannot read the model config in {folder}: {in_one_line(exc)}") from exc
    return config


def _text_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the config of the decoder in a model for text and images, which is served without its other parts."""
    if config.is_encoder_decoder or (text := config.get_text_config(decoder=True)) is config:
        return config
    text.dtype = text.dtype or config.dtype
    for name in ("eos_token_id", "tie_word_embeddings"):
        if (value := getattr(config, name, None)) is not None:
            setattr(text, name, value)
    return text


def _without_kv_cache(config: PreTrainedConfig) -> str | None:
    """Returns the reason why a KV cache of this model's layers is not its whole memory of previous tokens; None if it
    can be. `reference` finds models whose config does not say it."""
    if config.is_encoder_decoder:
        return "which has an encoder"
    if not getattr(config, "num_attention_heads", None):
        return "which has no attention"
    if others := sorted({*(getattr(config, "layer_types", None) or ())} - ATTENTION_KINDS):
        return f"which has layers of the kind {', '.join(others)}, whose state is not in a KV cache"
    return None


def read_shape(folder: Path, config: PreTrainedConfig, *, generation: Path | None = None) -> ModelShape:
    """Returns the sizes of a model. As in transformers, the end tokens of generation_config.json take precedence, which
    is in the folder `generation` if it is not in the model's. Raises ModelLoadError for a value that is not a size."""

    def size(name: str, unset: int | None = None) -> int:
        value = getattr(config, name, None)
        value = unset if value is None else value
        if type(value) is not int or not 0 < value <= MAX_SIZE:
            raise ModelLoadError(f"{folder / 'config.json'}: {name} is {_shown(value)}, and must be a number from 1 on")
        return value

    heads, context = size("num_attention_heads"), size("max_position_embeddings")
    return ModelShape(
        num_layers=size("num_hidden_layers"),
        num_kv_heads=size("num_key_value_heads", heads),
        head_dim=_latent_head_dim(config) or size("head_dim", size("hidden_size") // heads),
        vocab_size=size("vocab_size"),
        max_model_len=context,
        default_length=default_length(config, context),
        eos_token_ids=_eos_token_ids(folder, config, generation=generation or folder),
    )


def _latent_head_dim(config: PreTrainedConfig) -> int | None:
    """Returns the size of a key head in latent attention (DeepSeek V2 and V3), whose keys have a part with RoPE and a
    part without; None for other attention."""
    parts = [getattr(config, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    sizes = [part for part in parts if type(part) is int]
    return sum(sizes) if len(sizes) == len(parts) else None


def load_model(folder: Path, config: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Returns the model on `device`, in evaluation mode. Raises UnsupportedModelError for a quantized checkpoint whose
    format is not supported, and ModelLoadError, which names the tensor and its file where it can."""
    config = copy.deepcopy(config)
    for text in (config, config.get_text_config()):
        for field in CONFIG_FIELDS:  # otherwise transformers looks for the kernels of the format
            text.__dict__.pop(field, None)
    model: PreTrainedModel
    report: dict[str, list[str]]
    try:
        checkpoint = DequantizedCheckpoint.open(folder)
        tensors = plain_tensors(read_headers([folder], FileReading())) if checkpoint is None else checkpoint.tensors
        if (layers := config.get_text_config().num_hidden_layers) > len(tensors):  # creating them would take too long
            file = folder / "config.json"
            raise ModelLoadError(f"{file} describes {layers} layers, and the files have {len(tensors)} tensors")
        empty = _empty_model(config)
        if checkpoint is not None:
            checkpoint = checkpoint.without_zero_biases(name for name, _ in empty.named_parameters())
            logger.info("%s", checkpoint.description(dtype))
        _check_stored(empty, tensors, checkpoint=checkpoint, folder=folder)
        model, report = type(empty).from_pretrained(  # type: ignore[misc]  # a pair with output_loading_info
            folder if checkpoint is None else None,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            experts_implementation=EXPERTS_NAME if device.type == "cpu" else None,
            local_files_only=True,
            output_loading_info=True,
            state_dict=None if checkpoint is None else checkpoint.state_dict(dtype),
            key_mapping=TEXT_PART if (is_part := any(map(TEXT_PART_NAME.match, tensors))) else None,
        )
    except MotetError:
        raise
    except Exception as exc:  # any value of the config that transformers does not check
        raise ModelLoadError(f"cannot load the model in {folder}: {in_one_line(exc)}") from exc
    if missing := sorted([*report["missing_keys"], *map(str, report["mismatched_keys"])]):
        # transformers fills them with random numbers and continues.
        raise ModelLoadError(f"the weights in {folder} lack {len(missing)} tensors of the model, such as {missing[0]}")
    possible = (name for name in report["unexpected_keys"] if not is_part or TEXT_PART_NAME.match(name))
    if unexpected := sorted(name for name in possible if not is_unused(name, tensors)):
        # transformers ignores them: with a bias that the config does not mention, the answers would be wrong.
        raise _file_error(
            unexpected[0],
            f"{config.model_type} models with this config do not have it",
            tensors=tensors,
            folder=folder,
        )
    torch.nn.Module.to(model, device)
    check_finite(model, tensors, folder=folder)
    return model


def _empty_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Returns the model without memory for its weights."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=ATTENTION_NAME, trust_remote_code=False
        )
    return model


def _check_stored(
    empty: PreTrainedModel,
    tensors: Mapping[str, LogicalTensor],
    *,
    checkpoint: DequantizedCheckpoint | None,
    folder: Path,
) -> None:
    """Compares the tensors of a checkpoint with the model's, before any weight is read. Raises ModelLoadError for a
    tensor of another shape, or with a dtype that weights do not have, and UnsupportedModelError for a quantized
    model with layers whose weights are transposed."""
    for name, parameter in empty.named_parameters(remove_duplicate=False):
        if (tensor := tensors.get(name)) is None:
            continue
        if tensor.shape != tuple(parameter.shape):
            why = f"its shape is {[*tensor.shape]}, and the model's is {[*parameter.shape]}"
            raise _file_error(name, why, tensors=tensors, folder=folder)
        if checkpoint is None and (dtype := tensor.parts[""].dtype) not in FLOATS:
            allowed = (
                f"{folder / 'config.json'} has no quantization_config; without it, {', '.join(FLOATS)} can be used"
            )
            why = f"its dtype is {cut(dtype, MAX_VALUE_CHARS)}, but {allowed}"
            raise _file_error(name, why, tensors=tensors, folder=folder)
    num_weights = sum(parameter.numel() for parameter in empty.parameters())
    found = sum(torch.Size(tensor.shape).numel() for tensor in tensors.values())
    if num_weights > MAX_MISSING_RATIO * found:  # otherwise transformers would allocate them
        raise ModelLoadError(f"{folder / 'config.json'} describes {num_weights} weights, and the files have {found}")
    if checkpoint is not None and any(isinstance(module, Conv1D) for module in empty.modules()):
        raise UnsupportedModelError(
            f"{folder} contains {type(empty).__name__}, whose layers store transposed weights; such a model cannot be "
            f"loaded from {checkpoint.format.description}"
        )


def _file_error(name: str, why: str, *, tensors: Mapping[str, LogicalTensor], folder: Path) -> ModelLoadError:
    """Returns an error about a tensor of the model, which names its file. If transformers renamed the tensor, the error
    names the folder."""
    file = tensors[name].file if name in tensors else folder
    return ModelLoadError(f"tensor {cut(name, MAX_VALUE_CHARS)} in {file}: {why}")


def is_unused(name: str, tensors: Mapping[str, LogicalTensor]) -> bool:
    """Returns True for tensors that published checkpoints have and no decoder needs: scales of a quantized KV cache,
    layers that predict several tokens, and the causal masks of GPT-J and GPT-Neo, which have four dimensions."""
    mask = name.endswith(".bias") and name in tensors and len(tensors[name].shape) == 4
    return mask or name.rpartition(".")[2] in UNUSED or MTP.search(name) is not None


def check_finite(model: torch.nn.Module, tensors: Mapping[str, LogicalTensor], *, folder: Path) -> None:
    """Raises ModelLoadError if a weight is NaN or infinite: every request would fail."""
    for name, weights in model.named_parameters():
        if not is_finite(weights.detach()):
            raise _file_error(name, NOT_FINITE, tensors=tensors, folder=folder)


def has_experts(config: PreTrainedConfig) -> bool:
    """Returns True for a mixture of experts."""
    return any("experts" in name and type(value) is int and value > 1 for name, value in config.to_dict().items())


def has_padded_experts(model: PreTrainedModel) -> bool:
    """Returns True if `step.padded_experts` can compute all experts, if there are any. Some families have code of their
    own, in which the bits of a row depend on the other rows of the step."""
    return not has_experts(model.config) or any(hasattr(module, "has_gate") for module in model.modules())


def resolve_device(name: str) -> torch.device:
    """Returns the device of this name. `auto` is the first CUDA device, or the CPU without one."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise ConfigError(f"--device {name!r} is not a device; use auto, cpu, cuda or cuda:K") from exc
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name!r} is not supported; use auto, cpu, cuda or cuda:K")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name!r}: torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda:0") if name == "cuda" else device


def resolve_dtype(name: str, config: PreTrainedConfig) -> torch.dtype:
    """Returns the dtype of this name. `auto` is the dtype in which the weights were saved."""
    if name != "auto":
        if name not in DTYPES:
            raise ConfigError(f"--dtype {name!r} is unknown; use auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    saved = _saved_dtype(config)
    if saved not in DTYPES.values():
        raise ModelLoadError(f"the model config has the dtype {saved}; set --dtype to {', '.join(DTYPES)}")
    return saved


def weights_in_memory(folder: Path, config: PreTrainedConfig, *, dtype: torch.dtype) -> int:
    """Returns the number of bytes of a model's weights in this dtype. Raises UnsupportedModelError for a quantized
    checkpoint whose format is not supported, and ModelLoadError."""
    if (checkpoint := DequantizedCheckpoint.open(folder)) is not None:
        return checkpoint.num_bytes(dtype)
    try:
        saved_bytes = sum(file.stat().st_size for file in weight_files(folder))
    except OSError as exc:
        raise ModelLoadError(f"{exc.filename} cannot be read: {exc.strerror}") from exc
    return saved_bytes * dtype.itemsize // _saved_dtype(config).itemsize


def _saved_dtype(config: PreTrainedConfig) -> torch.dtype:
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def _eos_token_ids(folder: Path, config: PreTrainedConfig, *, generation: Path) -> tuple[int, ...]:
    file, found = folder / "config.json", config.eos_token_id
    if (other := generation / GENERATION_CONFIG).exists() and (ids := read_object(other).get("eos_token_id")):
        file, found = other, ids
    if found is None:
        return ()
    tokens = tuple(found) if isinstance(found, list | tuple) else (found,)
    if not all(type(token) is int and 0 <= token <= MAX_SIZE for token in tokens):
        raise ModelLoadError(f"{file}: eos_token_id is {_shown(found)}, and must be a token id or a list of token ids")
    return tokens


def in_one_line(error: Exception) -> str:
    return cut(" ".join(str(error).split()) or type(error).__name__, MAX_REASON_CHARS)


def _shown(value: object) -> str:
    return cut(repr(value), MAX_VALUE_CHARS)
