"""Products with int8 weights equal the products with the rounded weights exactly, in a batch of any size."""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from motet.engines.native import compiled_kernels as c
from motet.engines.native.build import build_parts
from motet.engines.native.cpu.panels import MAX_INT8, Packer, Panels
from motet.errors import ConfigError
from tests.engines.native.cpu.test_kernels import of_tokens
from tests.engines.native.drive import build_core, group, make_core, prompt_of, run
from tests.tiny_engine import engine_config
from tests.tiny_models import config_of

pytestmark = pytest.mark.kernels

Tiny = Callable[[str], Path]
SHAPES = [(96, 64), (330, 32), (64, 2080)]
"""(columns, depth): with one panel too many, with columns that fill no panel, and deeper than is summed at once."""
LENGTH = 300


class Products:
    """Computes products with the compiled kernels alone."""

    def __init__(self, kernels: ctypes.CDLL, num_threads: int) -> None:
        self._kernels = kernels
        self._model = c.Model()
        self._forward = kernels.motet_open(ctypes.byref(self._model), num_threads)

    def of(self, panels: Panels, x: torch.Tensor) -> torch.Tensor:
        count, depth, _ = panels.numbers.shape
        scales = None if panels.scales is None else panels.scales.data_ptr()
        linear = c.PackedLinear(panels.numbers.data_ptr(), scales, None, count * c.PANEL, depth)
        output = torch.empty(len(x), count * c.PANEL)
        self._kernels.motet_multiply(self._forward, ctypes.byref(linear), x.data_ptr(), len(x), output.data_ptr())
        return output

    def close(self) -> None:
        self._kernels.motet_close(self._forward)


@pytest.fixture(params=[1, 3], ids=["alone", "three threads"])
def products(request: pytest.FixtureRequest) -> Iterator[Products]:
    opened = Products(kernels(), request.param)
    yield opened
    opened.close()


def kernels() -> ctypes.CDLL:
    found = c.library()
    assert found is not None
    return found


def packed(weight: torch.Tensor, *, int8: bool, interleaved: torch.Tensor | None = None) -> Panels:
    columns, depth = weight.shape
    return Packer(kernels(), [(2 * columns, depth)], dtype=torch.int8 if int8 else torch.bfloat16).pack(
        weight, interleaved
    )


def integers(columns: int, depth: int, seed: int = 0) -> torch.Tensor:
    """Returns a weight that int8 does not change: integers, with a 127 in every column."""
    weight = torch.randint(-MAX_INT8, MAX_INT8 + 1, (columns, depth), generator=torch.Generator().manual_seed(seed))
    weight[:, 5] = MAX_INT8
    return weight.bfloat16()


def rows_of(count: int, depth: int) -> torch.Tensor:
    return torch.randn(count, depth, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_products_of_integers_have_the_bits_of_bf16(columns: int, depth: int, products: Products) -> None:
    weight, x = integers(columns, depth), rows_of(40, depth)
    expected = products.of(packed(weight, int8=False), x)
    assert torch.equal(products.of(packed(weight, int8=True), x), expected)
    assert torch.allclose(expected[:, :columns].double(), x.double() @ weight.double().T, rtol=1e-4, atol=0.05)


def test_the_columns_of_two_interleaved_weights_keep_their_own_scales(products: Products) -> None:
    one, other, x = integers(48, 64), integers(48, 64, seed=2) * 4, rows_of(3, 64)
    expected = products.of(packed(one, int8=False, interleaved=other), x)
    assert torch.equal(products.of(packed(one, int8=True, interleaved=other), x), expected)


@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_a_row_has_the_same_bits_in_a_batch_of_any_size(columns: int, depth: int, products: Products) -> None:
    panels = packed(torch.randn(columns, depth).bfloat16(), int8=True)
    x = rows_of(40, depth)
    batch = products.of(panels, x)
    for count in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25):
        assert torch.equal(products.of(panels, x[-count:].contiguous()), batch[-count:]), f"{count} rows"


def test_rounding_is_to_the_nearest_of_255_steps_and_zeros_stay_zeros() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(4)).bfloat16()
    weight[7] = 0
    panels = packed(weight, int8=True)
    assert panels.scales is not None
    steps = weight.float().abs().amax(1) / MAX_INT8
    assert torch.equal(panels.scales[steps > 0], steps[steps > 0])
    again = Products(kernels(), 1).of(panels, torch.eye(96).bfloat16()).T
    assert ((again - weight.float()).abs() <= steps[:, None] * 0.5001).all()
    assert again[7].eq(0).all()


def rounded(folder: Path) -> PreTrainedModel:
    """Returns transformers' float32 model with the weights rounded as int8 does."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    torch.nn.Module.to(model, torch.float32)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                steps = (module.weight.abs().amax(1, keepdim=True) / MAX_INT8).clamp_min(1e-30)  # padding is all zeros
                module.weight.copy_((module.weight / steps).round() * steps)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_log_probabilities_are_those_of_the_rounded_weights(tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = LlamaConfig(**{**config_of("llama").to_dict(), "tie_word_embeddings": tied})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path)
    prompt = prompt_of(LENGTH, 5)
    with torch.inference_mode():
        logits = rounded(tmp_path)(torch.tensor([prompt]), use_cache=False).logits[0]
    truth = logits.log_softmax(-1)[torch.arange(LENGTH - 1), list(prompt[1:])]

    def error(quantization: str) -> float:
        core = build_core(engine_config(tmp_path, dtype="bfloat16", quantization=quantization))
        report = run(core, [group("p", prompt, prompt_logprobs=0, max_tokens=1)])["p"].prompt
        assert report is not None and report.logprobs is not None
        return float((of_tokens(report.logprobs) - truth).abs().mean())

    assert error("int8") < 0.5 * error("none"), "unrounded weights are another model"


@pytest.mark.slow
def test_an_engine_names_its_rounded_weights_in_fingerprint_and_kv_facts(tiny: Tiny) -> None:
    plain = make_core(tiny("llama"), dtype="bfloat16").info.fingerprint
    core = make_core(tiny("llama"), dtype="bfloat16", quantization="int8")
    assert core.info.fingerprint == plain.replace("_x86_64", "-int8_x86_64") != plain
    facts = [
        build_parts(engine_config(tiny("llama"), dtype="bfloat16", quantization=name)).facts
        for name in ("none", "int8")
    ]
    assert facts[0].differences(facts[1]) == ["quantization is none here and int8 there"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "float32"}, "with int8 weights the kernels compute in bfloat16, not in float32"),
        ({"dtype": "bfloat16", "kernels": "torch"}, "--kernels torch was given"),
    ],
)
def test_torchs_operators_have_no_int8(fields: dict[str, str], reason: str, tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=f"--quantization int8 needs the compiled kernels: {reason}"):
        build_parts(engine_config(tiny("llama"), quantization="int8", **fields))
