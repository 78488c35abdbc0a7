"""Measures entire layers without reads of the KV cache: Motet's, torch's, and torch's compiled by inductor.

A layer has a norm, joined queries, keys and values, the output projection, a norm, the gated feed-forward part, and the
residuals. In torch, the output projection multiplies the queries. Motet's kernels also rotate heads by their position,
store keys and values, and attend to one key per row, because these parts cannot be turned off. There are several
layers, because the weights of one layer would stay in a cache.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from bench.program.report import Cells
from motet.engines.native.attention.attention_plan import AttentionPlan, PromptRead
from motet.engines.native.compiled_kernels import library
from motet.engines.native.cpu.cpu_runner import CpuRunner
from motet.engines.native.cpu.packed_weights import PackedModel
from motet.engines.native.kv.storage import KVLayout, KVStorage
from motet.engines.native.step.inputs import StepInputs
from motet.engines.native.step.run import ATTENTION_NAME
from motet.errors import StartupError

LAYERS = 16
"""Number of layers. Their weights take 100 MB."""
ROWS = (1, 8, 32)
SETTLE_S = 0.03
Layers = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class LayerCost:
    rows: int
    way: str
    us_a_layer: float
    relative_time: float
    compile_s: float

    def cells(self) -> Cells:
        return [
            ("rows", self.rows, ""),
            ("way", self.way, "<"),
            ("us per layer", self.us_a_layer, ".1f"),
            ("/ ours", self.relative_time, ".2f"),
            ("compiled in s", self.compile_s, ".1f"),
        ]


def config_of_layers() -> LlamaConfig:
    """Returns the sizes of the default model, with a tiny vocabulary."""
    return LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=32,
        max_position_embeddings=64,
    )


class TorchLayers(nn.Module):
    """Layers in torch. Queries, keys and values are one product, gate and up another, as in inference engines."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.hidden = hidden = config.hidden_size
        self.qkv, self.out, self.gate_up, self.down = (
            nn.ModuleList(nn.Linear(depth, columns, bias=False) for _ in range(LAYERS))
            for depth, columns in ((hidden, 960), (hidden, hidden), (hidden, 3072), (1536, hidden))
        )
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2 * LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(LAYERS):
            x = x + self.out[i](self.qkv[i](self.norms[2 * i](x))[:, : self.hidden])
            gate, up = self.gate_up[i](self.norms[2 * i + 1](x)).chunk(2, -1)
            x = x + self.down[i](F.silu(gate) * up)
        return x


class MotetLayers:
    def __init__(self, rows: int, *, int8: bool) -> None:
        if (kernels := library()) is None:
            raise StartupError("the compiled kernels were not built, or this processor has neither AVX-512 nor AVX2")
        config = config_of_layers()
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
        )
        storage = KVStorage(KVLayout(LAYERS, 16, 3, 64, torch.bfloat16), rows, device=torch.device("cpu"))
        packed = PackedModel(model, storage, max_positions=64, kernels=kernels, int8=int8)
        self._runner = CpuRunner(packed, storage, num_threads=torch.get_num_threads(), kernels=kernels)
        reads = tuple(PromptRead(row, row + 1, 0, 1, [row]) for row in range(rows))
        zeros, slots = [0] * rows, [16 * row for row in range(rows)]
        self._inputs = StepInputs(zeros, zeros, slots, [0], 1, [], [], AttentionPlan(0, reads, (), ()))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._runner.run(self._inputs)


def compiled(layers: TorchLayers, x: torch.Tensor, *, cpp_wrapper: bool) -> tuple[Layers, float]:
    """Returns the compiled layers and the compile time in seconds. Inductor treats frozen weights as constants, and
    packs them for oneDNN."""
    torch.compiler.reset()
    begin = time.perf_counter()
    found: Layers = torch.compile(layers, options={"freezing": True, "cpp_wrapper": cpp_wrapper})
    found(x)
    return found, time.perf_counter() - begin


@torch.no_grad()  # inductor would not pack tensors made in inference mode
def measure_rows(rows: int, repeats: int) -> list[LayerCost]:
    layers, x = TorchLayers(config_of_layers()).to(torch.bfloat16).eval(), torch.randn(rows, 576).bfloat16()
    ways: dict[str, tuple[Layers, float]] = {
        "ours": (MotetLayers(rows, int8=False), 0.0),
        "ours int8": (MotetLayers(rows, int8=True), 0.0),
        "torch": (layers, 0.0),
        "inductor": compiled(layers, x, cpp_wrapper=False),
        "inductor, cpp_wrapper": compiled(layers, x, cpp_wrapper=True),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, (run, _s) in ways.items():
            seconds[way].append(timed(run, x))
    medians = {way: median(times) for way, times in seconds.items()}
    return [LayerCost(rows, way, s / LAYERS * 1e6, s / medians["ours"], ways[way][1]) for way, s in medians.items()]


def timed(run: Layers, x: torch.Tensor, calls: int = 5) -> float:
    """Returns the seconds per call, measured after the threads of the way before have fallen asleep."""
    time.sleep(SETTLE_S)
    run(x)
    begin = time.perf_counter()
    for _ in range(calls):
        run(x)
    return (time.perf_counter() - begin) / calls


def measure_layers(repeats: int) -> list[LayerCost]:
    return [cost for rows in ROWS for cost in measure_rows(rows, repeats)]
