"""The comparison of ways to multiply: costs follow from seconds, and every way computes the right product. And the
comparison of families: its default models can be made, and it measures every case on both backends. And the cost of the
checks at load: it is measured with a saved model and random ones, and extrapolated."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from bench.kernels import families, load_checks
from bench.kernels.__main__ import SHAPES, costs_of, measure, parse, parse_shape
from bench.kernels.multiplications import BYTES, WAYS
from bench.kernels.weight_copies import num_copies
from bench.program.report import table
from tests.tiny_models import save_tiny_model


def test_costs_follow_from_seconds() -> None:
    one, half, motet = costs_of("1000x500", 4, {"torch bf16": 2e-3, "torch int4": 1e-3, "ours": 5e-4})
    assert (one.us, one.gb_per_s, one.gflop_per_s, one.relative_time) == pytest.approx((2000, 0.5, 2.0, 4.0))
    assert (half.gb_per_s, half.relative_time) == pytest.approx((0.25, 2.0)), "a weight of half a byte"
    assert motet.relative_time == 1.0


@pytest.mark.parametrize("shape", SHAPES)
def test_copies_of_the_weights_are_larger_than_any_cache(shape: str) -> None:
    depth, columns = parse_shape(shape)
    copies = num_copies(depth, columns)
    assert copies * depth * columns * min(BYTES.values()) >= 2**26
    assert copies >= 2


def test_the_ways_must_include_motets() -> None:
    assert parse(["--ways", "ours,torch bf16"]).ways == ("ours", "torch bf16")
    for ways in ("torch bf16", "ours,cublas"):
        with pytest.raises(SystemExit):
            parse(["--ways", ways])


@pytest.mark.kernels
@pytest.mark.parametrize(
    "way", [way for way in WAYS if way != "torch int4"]
)  # its products are wrong: it is only timed
@torch.inference_mode()
def test_every_way_computes_the_product(way: str) -> None:
    weights = [torch.randn(128, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2)]
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(9)).bfloat16()
    multiply = WAYS[way](weights, 4)
    for copy, weight in enumerate(weights):
        output = multiply(copy, x)
        assert isinstance(output, torch.Tensor)
        assert torch.allclose(output.float(), x.float() @ weight.float().T, atol=0.5)


@pytest.mark.slow
@pytest.mark.kernels
def test_a_run_measures_every_way_at_every_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.kernels.weight_copies.num_copies", lambda depth, columns: 2)
    costs = measure("64x4096", (1, 2), tuple(WAYS), repeats=1)
    assert [(cost.rows, cost.way) for cost in costs] == [(rows, way) for rows in (1, 2) for way in WAYS]
    assert all(cost.us > 0 for cost in costs)
    assert len(table(cost.cells() for cost in costs).rows) == len(costs)


@pytest.mark.slow
@pytest.mark.kernels
def test_a_run_measures_families_on_the_kernels_and_on_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Olmo3's model states the kind of each layer, so it can be made with one number of layers only. Gemma3's config is
    not named like its architecture."""
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setattr(families, "SIZES", families.SIZES | small)
    monkeypatch.setattr(families, "SAVED", tmp_path / "saved.json")
    names = ("Gemma3", "Olmo3")
    cases = [(name, case) for name in names for case in ("prompt", "decode, n = 2")]
    for name in names:  # the second run keeps what the first one has saved
        assert families.main(["--names", name, "--ns", "2", "--repeats", "1", "--save"]) == 0
        rows = json.loads(capsys.readouterr().out.splitlines()[-1])["families"]
        assert [(row["family"], row["case"]) for row in rows] == [case for case in cases if case[0] == name]
        assert all(row["compiled"] > 0 and row["torch"] > 0 for row in rows)
    ratios = families.SavedRatios.read().ratios
    assert [(name, case) for name, found in ratios.items() for case in found] == cases
    assert min(ratio for found in ratios.values() for ratio in found.values()) > 0


@pytest.mark.slow
@pytest.mark.kernels
def test_the_cost_of_the_checks_at_load_is_extrapolated_from_two_numbers_of_layers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = partial(LlamaConfig, hidden_size=64, intermediate_size=128, num_attention_heads=2, vocab_size=320)
    monkeypatch.setattr(load_checks, "LlamaConfig", small)
    saved = save_tiny_model("llama", tmp_path)
    assert load_checks.main(["--model", str(saved), "--layers", "1,3", "--repeats", "1", "--threads", "1"]) == 0
    *measured, last = json.loads(capsys.readouterr().out.splitlines()[-1])["costs"]
    assert [cost["layers"] for cost in measured] == [3, 1, 3]
    assert all(cost["check_s"] > 0 and cost["kernels"] != "torch" for cost in measured)
    assert all(cost["difference"] < 0.02 for cost in measured)
    one, three = (cost["reference_s"] for cost in measured[1:])
    assert last["layers"] == 32
    assert last["reference_s"] == pytest.approx(three + 29 * (three - one) / 2)
