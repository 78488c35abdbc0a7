"""Every architecture of the table equals transformers, with the backend that the table names."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.activations import ACT2FN
from transformers.models.seed_oss import modeling_seed_oss

from bench.accuracy import prompt_logits
from motet.engines.native.build import Parts, build_parts
from motet.engines.native.checks.reference import difference_of
from motet.engines.native.compiled_kernels import KINDS
from motet.engines.native.cpu.cpu_runner import CpuRunner, PackedWeights
from motet.engines.native.cpu.model_reader import read_structure
from motet.engines.native.cpu.norm_reader import StructureError
from motet.engines.native.cpu.packed_weights import PackedModel
from motet.engines.native.model import load_model, read_config
from motet.models.checkpoint import CheckpointKind
from motet.types import ChoiceStart, GenerateRequest
from tests.engines.native.drive import gb_of, group, make_core, prompt_of, run
from tests.engines.native.pair import CorePair
from tests.engines.native.recorder import RowKey, recorded_over
from tests.kernels import kernels_of
from tests.tiny_architectures import ARCHITECTURES, WITHOUT_KERNELS, save_tiny_architecture
from tests.tiny_engine import engine_config
from tests.tiny_models import FAMILIES, SIZES, Reference, save_tiny_model
from tools.models_page import ADAPTERS, PAGE, page

pytestmark = [pytest.mark.slow, pytest.mark.kernels]

IN_SHORT = {"SmolLM3", "Cohere", "GPTNeoX", "GptOss", "Qwen2Moe", "DeepseekV3"}
"""Architectures of `make test`: among them are layers without RoPE, sliding windows, experts, and padded values. The
others are in `make test-long`. With more of them, `tests.thinned` would choose."""
NAMES, ALL_NAMES = (
    [pytest.param(name, marks=() if name in IN_SHORT else pytest.mark.long) for name in names]
    for names in (ARCHITECTURES, (*ARCHITECTURES, *FAMILIES))
)
PROMPT, OTHER, LENGTH = prompt_of(40), prompt_of(30, 7), 24


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = save_tiny_architecture(name, tmp_path)
    core = make_core(folder, blocks=2048)
    assert (core.info.kernels == "torch") == (name in WITHOUT_KERNELS)
    assert WITHOUT_KERNELS.get(name, "") in core.info.kernels_note
    assert (core.info.max_adapters > 0) == (ADAPTERS == "yes")
    outcome = run(core, [group("g", PROMPT, n=2, temperature=0.0, max_tokens=LENGTH)])["g"]
    assert outcome.tokens[0] == outcome.tokens[1] == Reference(folder).greedy(PROMPT, LENGTH)
    assert core.info.fingerprint.endswith("-same")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_choice_has_the_same_bits_alone_as_in_a_group_whose_prompt_is_cut(
    name: str, dtype: str, tmp_path: Path
) -> None:
    parts = build_parts(engine_config(save_tiny_architecture(name, tmp_path), dtype=dtype, kv_cache_gb=gb_of(1024)))
    rows = [
        rows_of(parts, [group("a", PROMPT, seed=5, max_tokens=12)], budget=512),
        rows_of(
            parts,
            [
                group("b", prompt_of(30, 7), n=2, seed=900, max_tokens=20),
                group("a", PROMPT, n=3, seed=5, max_tokens=12),
            ],
            budget=28,
        ),
    ]
    assert len(rows[0]) == 12
    assert all(torch.equal(rows[1][key], row) for key, row in rows[0].items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ALL_NAMES)
def test_tokens_are_the_same_with_separate_prefill_and_after_a_move_to_another_engine(
    name: str, dtype: str, tmp_path: Path
) -> None:
    """Choices of a killed worker continue on another one after the tokens that the router has received."""
    folder = save_tiny_model(name, tmp_path) if name in FAMILIES else save_tiny_architecture(name, tmp_path)
    request = group("g", PROMPT, n=3, seed=5, max_tokens=LENGTH)
    parts = build_parts(engine_config(folder, dtype=dtype, kv_cache_gb=gb_of(1024)))
    expected = run(recorded_over(parts)[0], [request])["g"].tokens
    pair = CorePair(folder, dtype=dtype, prefill_blocks=512, decode_blocks=512)
    pair.hand_over(request)
    received = pair.outcomes["g"].tokens
    while len(received.get(0, ())) < 9:
        pair.step_d()
        pair.land_all()
    starts = [ChoiceStart(index, 5 + index, tuple(found[: 9 - 4 * index])) for index, found in received.items()]
    pair.finish()
    assert received == expected
    pair.check_empty()
    prefill, decode = pair.p.stats(), pair.d.stats()
    assert (prefill.prefill_tokens, decode.prefill_tokens, decode.transfers) == (len(PROMPT) - 1, 1, 1)
    resumed = run(recorded_over(parts)[0], [group("g", PROMPT, starts=starts, max_tokens=LENGTH)])["g"].tokens
    assert resumed == {start.index: expected[start.index][len(start.output_tokens) :] for start in starts}


def rows_of(parts: Parts, requests: list[GenerateRequest], *, budget: int) -> dict[RowKey, torch.Tensor]:
    """Returns the logits of all sampled tokens."""
    options = replace(parts.options, max_num_batched_tokens=budget)
    core, recorder = recorded_over(replace(parts, options=options))
    run(core, requests, stagger=2)
    return recorder.rows


@pytest.mark.parametrize(
    "numbers", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}]
)
@pytest.mark.parametrize("name", ["Persimmon", "GPTNeoX", "Phi3", "Phi", "Cohere"])
def test_new_weights_are_written_to_every_form_of_packing(name: str, numbers: dict[str, str], tmp_path: Path) -> None:
    """Fused products grouped by head, fused gates, plain products with biases, and norms of each head."""
    folders = [save_tiny_architecture(name, tmp_path / f"{seed}", seed=seed) for seed in (3, 4)]
    parts, expected = (build_parts(engine_config(folder, kv_cache_gb=gb_of(512), **numbers)) for folder in folders)
    assert parts.info.kernels != "torch"
    loaded = parts.weights.prepare(CheckpointKind.FILES, [folders[1]])
    loaded.staged.apply()
    request = group("g", PROMPT, seed=5, max_tokens=6)
    rows, expected_rows = (rows_of(one, [request], budget=512) for one in (parts, expected))
    assert all(torch.equal(rows[key], row) for key, row in expected_rows.items())
    assert isinstance(parts.runner, CpuRunner)
    weights = PackedWeights(parts.runner)
    for path, tensor in load_file(folders[1] / "model.safetensors").items():
        path = path.replace("embed_out", "lm_head")  # the name in checkpoints of GPT-NeoX
        if numbers["dtype"] == "float32":
            assert torch.equal(weights.numbers(path)[0], tensor), path
        assert weights.numbers(path)[0].shape == tensor.shape


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["GPTNeoX", "Cohere", "Glm4", "HunYuanDenseV1"])
def test_each_kind_of_kernels_computes_partial_and_adjacent_rotation_and_norms_of_heads(
    name: str, kind: str, dtype: str, tmp_path: Path
) -> None:
    kernels, folder = kernels_of(kind), save_tiny_architecture(name, tmp_path)
    parts = build_parts(engine_config(folder, dtype=dtype, kernels="torch"))
    model = load_model(folder, read_config(folder), dtype=parts.storage.keys.dtype, device=torch.device("cpu"))
    packed = PackedModel(model, parts.storage, max_positions=512, kernels=kernels)
    runner = CpuRunner(packed, parts.storage, num_threads=2, kernels=kernels)
    found, expected = prompt_logits(replace(parts, runner=runner), list(PROMPT)), Reference(folder).logits(PROMPT)
    assert difference_of(found, expected) < (1e-5 if dtype == "float32" else 0.05)


@pytest.mark.parametrize("gated", [True, False])
def test_every_activation_of_transformers_is_computed(gated: bool, tmp_path: Path) -> None:
    """Except those with weights, and one that is not defined everywhere."""
    for activation in sorted(set(ACT2FN) - {"prelu", "xielu", "sqrtsoftplus"}):
        name = "Ernie4_5" if gated else "Arcee"
        folder = save_tiny_architecture(name, tmp_path / activation, hidden_act=activation, num_hidden_layers=1)
        parts = build_parts(engine_config(folder, dtype="float32"))
        assert parts.info.kernels != "torch", activation
        found, expected = prompt_logits(parts, list(PROMPT)), Reference(folder).logits(PROMPT)
        assert difference_of(found, expected) < 1e-5, activation


def test_queries_that_depend_on_the_position_otherwise_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factor that starts at a position after the tokens that are compared at load, as in Ministral 3."""
    folder = save_tiny_architecture("SeedOss", tmp_path)
    original = modeling_seed_oss.apply_rotary_pos_emb

    def scaled(q: torch.Tensor, *given: torch.Tensor, **named: object) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = original(q, *given, **named)
        row = q.shape[2] - 1
        query[:, :, row] *= 1.5 if row else 1.0
        return query, key

    monkeypatch.setattr(modeling_seed_oss, "apply_rotary_pos_emb", scaled)
    model = load_model(folder, read_config(folder), dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(StructureError, match="otherwise than by RoPE"):
        read_structure(model, max_positions=1000)


def test_the_page_of_models_has_the_table_of_this_test() -> None:
    assert PAGE.read_text() == page(), "run python -m tools.models_page"


@pytest.mark.parametrize("name", ["Gemma3", "Mistral3"])
def test_the_decoder_of_a_model_for_images_is_served_without_its_other_parts(name: str, tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**SIZES, "model_type": "gemma3_text" if name == "Gemma3" else "mistral", "sliding_window": 16}
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        tie_word_embeddings=False,
        eos_token_id=[1, 106],
    )
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    model.save_pretrained(tmp_path)
    core = make_core(tmp_path)
    assert core.info.kernels != "torch" and core.info.eos_token_ids == (1, 106)
    [tokens] = run(core, [group("g", PROMPT, temperature=0.0, max_tokens=8)])["g"].tokens.values()
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *tokens]]), attention_mask=torch.ones(1, 48)).logits[0, 39:-1]
    assert tokens == logits.argmax(-1).tolist()
