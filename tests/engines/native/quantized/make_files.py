"""Writes `files/*.safetensors` with the libraries that define the formats, in an environment of their own:

    python -m venv VENV && VENV/bin/pip install gptqmodel==7.7.0 autoawq==0.2.9 compressed-tensors==0.20.1
    VENV/bin/python tests/engines/native/quantized/make_files.py
    VENV/bin/pip install compressed-tensors==0.9.4
    VENV/bin/python tests/engines/native/quantized/make_files.py --ordered

Each file has the tensors of one linear layer, `layer.*`, as the library stores them, and `expected`, the weight that
the library's own dequantization computes. The `quantization_config` is in the metadata.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FILES = Path(__file__).parent / "files"
OUTPUTS = 32


def random_layer(inputs: int, outputs: int = OUTPUTS) -> torch.nn.Linear:
    layer = torch.nn.Linear(inputs, outputs, bias=False)
    torch.nn.init.normal_(layer.weight, std=0.05)
    return layer


def save(name: str, tensors: dict[str, Tensor], expected: Tensor, config: dict[str, Any]) -> None:
    stored = {f"layer.{part}": tensor.detach().contiguous().clone() for part, tensor in tensors.items()}
    stored["expected"] = expected.detach().contiguous().clone()
    save_file(stored, FILES / f"{name}.safetensors", metadata={"quantization_config": json.dumps(config)})


def scales_of(weight: Tensor, *, groups: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Returns scales and zero points [out, groups] of consecutive groups of inputs."""
    grouped = weight.detach().view(len(weight), groups, -1)
    if symmetric:
        scales = grouped.abs().amax(-1) / (2 ** (bits - 1) - 1)
        return scales, torch.full_like(scales, 2 ** (bits - 1))
    low, high = grouped.amin(-1).clamp_max(0), grouped.amax(-1).clamp_min(0)
    scales = (high - low) / (2**bits - 1)
    return scales, (-low / scales).round().clamp(0, 2**bits - 1)


def make_gptq(bits: int, group_size: int, *, symmetric: bool, ordered: bool, form: str) -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module

    inputs = 128 if group_size == 128 else 64 if group_size != 64 else 128
    layer, groups = random_layer(inputs), 1 if group_size == -1 else inputs // group_size
    group_of = torch.arange(inputs, dtype=torch.int32) // (inputs // groups)
    order = torch.randperm(inputs) if ordered else torch.arange(inputs)
    scales, zeros = scales_of(layer.weight[:, order], groups=groups, bits=bits, symmetric=symmetric)
    g_idx = torch.empty_like(group_of)
    g_idx[order] = group_of

    def module() -> Any:
        return TorchLinear(
            bits=bits, group_size=group_size, sym=symmetric, desc_act=ordered, in_features=inputs, out_features=OUTPUTS
        )

    packed = module()
    packed.pack(layer, scales, zeros, g_idx)
    if form == "gptq":
        convert_gptq_v2_to_v1_format_module(packed, _Config(bits))
    tensors = {part: getattr(packed, part).clone() for part in ("qweight", "qzeros", "scales", "g_idx")}
    loaded = module()
    for part, tensor in tensors.items():
        loaded.register_buffer(part, tensor.clone())
    if form == "gptq":
        convert_gptq_v1_to_v2_format_module(loaded, bits=bits, pack_dtype=torch.int32)
    loaded.post_init()
    loaded.eval()
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": symmetric,
        "desc_act": ordered,
        "checkpoint_format": form,
    }
    name = f"gptq-{bits}-{group_size}-{form}" + "-asymmetric" * (not symmetric) + "-ordered" * ordered
    save(name, tensors, loaded.dequantize_weight().T, config)


class _Config:
    """The fields of GPTQModel's `QuantizeConfig` that its conversion of zero points reads."""

    def __init__(self, bits: int) -> None:
        self.bits, self.pack_dtype = bits, torch.int32


def make_awq(group_size: int) -> None:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    inputs = 128
    layer, groups = random_layer(inputs), 1 if group_size == -1 else inputs // group_size
    scales, zeros = scales_of(layer.weight, groups=groups, bits=4, symmetric=False)
    scales, zeros = scales.T.contiguous(), zeros.T.contiguous()
    layer.half()
    packed = WQLinear_GEMM.from_linear(layer, 4, inputs if group_size == -1 else group_size, scales=scales, zeros=zeros)
    tensors = {part: getattr(packed, part) for part in ("qweight", "qzeros", "scales")}
    expected = dequantize_gemm(
        tensors["qweight"], tensors["qzeros"], tensors["scales"], 4, inputs if group_size == -1 else group_size
    ).T
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    save(f"awq-4-{group_size}", tensors, expected, config)


def make_compressed(name: str, form: str, *, dtype: torch.dtype = torch.bfloat16, **weights: Any) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    block = weights.get("block_structure")
    layer = random_layer(96, 40) if block else random_layer(128)
    weight = layer.weight.detach().to(dtype)
    args = QuantizationArgs(**weights)
    grouped = weight
    if weights["strategy"] == "group":
        grouped = weight.view(len(weight), -1, weights["group_size"])
    if block:
        padded = torch.nn.functional.pad(weight, (0, -96 % block[1], 0, -40 % block[0]))
        rows, columns = (size // side for size, side in zip(padded.shape, block, strict=True))
        grouped = padded.view(rows, block[0], columns, block[1]).transpose(1, 2).flatten(2)
    dims = (0, 1) if weights["strategy"] == "tensor" else (-1,)
    keep = weights["strategy"] == "channel"
    low, high = grouped.amin(dims, keepdim=keep), grouped.amax(dims, keepdim=keep)
    scale, zero_point = calculate_qparams(low, high, args)
    if weights["strategy"] == "tensor":
        scale, zero_point = scale.reshape(1), zero_point.reshape(1)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(form)
    state = {"weight": weight, "weight_scale": scale.to(dtype), "weight_zero_point": zero_point}
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}},
        "ignore": ["lm_head"],
    }
    save(f"compressed-{name}", stored, expected, config)


def make_ordered() -> None:
    """Makes the file with the group of each input, which compressed-tensors has not written since 2026."""
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs

    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32, actorder="group")
    weight, order = random_layer(128).weight.detach().bfloat16(), torch.randperm(128)
    scale = (weight[:, order].view(OUTPUTS, 4, 32).abs().amax(-1) / 7.5).bfloat16()
    g_idx = torch.empty(128, dtype=torch.int32)
    g_idx[order] = torch.arange(128, dtype=torch.int32) // 32
    compressor = PackedQuantizationCompressor(config=None)
    stored = compressor.compress_weight(
        weight=weight, scale=scale, zero_point=torch.zeros_like(scale), g_idx=g_idx, quantization_args=args
    )
    stored |= {"weight_scale": scale, "weight_g_idx": g_idx}
    expected = compressor.decompress_weight(stored, quantization_args=args)
    weights = json.loads(args.model_dump_json())
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    save("compressed-w4-32-ordered", stored, expected, config | {"config_groups": {"group_0": {"weights": weights}}})


def main() -> None:
    torch.manual_seed(0)
    FILES.mkdir(exist_ok=True)
    if "--ordered" in sys.argv:
        make_ordered()
        return
    for bits, group_size, symmetric, ordered, form in (
        (4, 32, True, False, "gptq"),
        (4, 64, False, True, "gptq"),
        (4, 128, True, True, "gptq_v2"),
        (4, -1, False, False, "gptq_v2"),
        (8, 32, False, False, "gptq"),
        (8, 64, True, False, "gptq_v2"),
        (8, 128, False, True, "gptq"),
        (8, -1, True, False, "gptq"),
    ):
        make_gptq(bits, group_size, symmetric=symmetric, ordered=ordered, form=form)
    for group_size in (32, 64, 128, -1):
        make_awq(group_size)
    group: dict[str, Any] = {"strategy": "group", "type": "int"}
    make_compressed("w4-32", "pack-quantized", num_bits=4, group_size=32, **group)
    make_compressed("w4-64-asymmetric", "pack-quantized", num_bits=4, group_size=64, symmetric=False, **group)
    make_compressed("w4-128-float16", "pack-quantized", num_bits=4, group_size=128, dtype=torch.float16, **group)
    make_compressed("w4-channel", "pack-quantized", num_bits=4, strategy="channel", type="int")
    make_compressed("w8-channel", "pack-quantized", num_bits=8, strategy="channel", type="int")
    make_compressed("w8-32-asymmetric", "pack-quantized", num_bits=8, group_size=32, symmetric=False, **group)
    whole: dict[str, Any] = {"num_bits": 8, "strategy": "channel"}
    make_compressed("int8-channel", "int-quantized", type="int", **whole)
    make_compressed("int8-channel-asymmetric", "int-quantized", type="int", symmetric=False, **whole)
    make_compressed("fp8-channel", "float-quantized", type="float", **whole)
    make_compressed("fp8-tensor", "float-quantized", num_bits=8, strategy="tensor", type="float")
    block: dict[str, Any] = {"num_bits": 8, "strategy": "block", "block_structure": [16, 64]}
    make_compressed("fp8-block", "float-quantized", type="float", **block)
    sys.stdout.write(f"{sum(file.stat().st_size for file in FILES.iterdir())} bytes in {FILES}\n")


if __name__ == "__main__":
    main()
