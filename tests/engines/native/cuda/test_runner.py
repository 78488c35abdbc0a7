"""The GPU's runner without its device: with layouts, buckets, padding and replays it gives the tokens of the CPU's
runner and of `transformers.generate`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from motet.engines.native.core import EngineCore
from motet.engines.native.cpu.model_reader import read_structure
from motet.engines.native.cpu.norm_reader import StructureError
from motet.engines.native.cuda.cuda_runner import CudaRunner
from motet.engines.native.cuda.layers import fuse
from motet.engines.native.model import load_model, read_config
from motet.errors import EngineError
from motet.types import GenerateRequest
from tests.engines.native.conftest import Expected
from tests.engines.native.cuda.cpu_runner import PLAIN, Repeating, cuda_parts
from tests.engines.native.drive import gb_of, group, make_core, prompt_of, run
from tests.tiny_architectures import save_tiny_architecture
from tests.tiny_models import FAMILIES, Reference, assert_greedy_equal

pytestmark = pytest.mark.slow

Tiny = Callable[[str], Path]
SIZES = {5: 1, 64: 5, 33: 2, 130: 3}
"""Number of choices by prompt length."""
NEW_TOKENS = 40
INFINITE_TOKEN = 7
SEVENTY_BLOCKS_GB = gb_of(70)
"""Memory so small that groups preempt each other."""


def core_over(folder: Path, recorder: Repeating | None, *, max_rows: int = 24, **changes: object) -> EngineCore:
    parts = cuda_parts(folder, recorder=recorder, operators=PLAIN, max_rows=max_rows, **changes)
    return EngineCore(parts.info, parts.runner, options=parts.options)


def requests(top_k: int = 0) -> list[GenerateRequest]:
    return [
        group(f"{length}", prompt_of(length, length), n=n, max_tokens=NEW_TOKENS, top_k=top_k)
        for length, n in SIZES.items()
    ]


@pytest.mark.parametrize(
    "family", [f if f in ("llama", "gemma2") else pytest.param(f, marks=pytest.mark.long) for f in FAMILIES]
)
def test_ragged_groups_with_preemption_chunks_and_graphs_equal_generate(
    family: str, tiny: Tiny, reference: Callable[[str], Reference], expected: Expected
) -> None:
    recorder = Repeating()
    core = core_over(
        tiny(family),
        recorder,
        max_num_batched_tokens=48,
        max_num_seqs=24,
        max_model_len=256,
        kv_cache_gb=SEVENTY_BLOCKS_GB,
    )
    outcomes = run(core, requests(top_k=1), stagger=3)
    assert core.counters.preemptions > 0 and core.counters.replayed_tokens > 0
    assert 20 < recorder.replayed < core.counters.steps, "some steps had prompts"
    for length, n in SIZES.items():
        assert sorted(outcomes[f"{length}"].tokens) == list(range(n))
        for tokens in outcomes[f"{length}"].tokens.values():
            complete = expected(family, length)[:NEW_TOKENS]
            assert_greedy_equal(reference(family), prompt_of(length, length), tokens, complete)


def test_replayed_steps_give_the_tokens_of_launched_ones(tiny: Tiny) -> None:
    recorder = Repeating()
    replayed = run(core_over(tiny("llama"), recorder), requests())
    launched = run(core_over(tiny("llama"), None), requests())
    assert recorder.replayed >= NEW_TOKENS - 1
    assert {name: one.tokens for name, one in replayed.items()} == {name: one.tokens for name, one in launched.items()}


def test_a_step_wider_than_every_graph_is_launched(tiny: Tiny) -> None:
    recorder = Repeating()
    core = core_over(tiny("llama"), recorder, max_rows=4)
    assert recorder.recorded == 3, "graphs for 1, 2 and 4 rows"
    outcome = run(core, [group("wide", prompt_of(20), n=9, max_tokens=5), group("one", prompt_of(9, 1), max_tokens=30)])
    assert len(outcome["wide"].tokens) == 9
    assert 20 <= recorder.replayed <= 25, "steps are replayed once the wide group has ended"


def test_a_prefix_that_prompts_share_is_read_once(tiny: Tiny) -> None:
    recorder = Repeating()
    prefix = prompt_of(520, 2)
    questions = [group(f"{i}", (*prefix, *prompt_of(250, 4 + i)), n=2, max_tokens=4, top_k=1) for i in range(4)]
    core = core_over(tiny("llama"), recorder, max_model_len=1024, max_num_batched_tokens=4096)
    run(core, [group("first", (*prefix, 9), max_tokens=1)])
    together = run(core, questions)
    assert recorder.replayed == 3, "steps of decode fit a graph"
    counters = core.counters
    assert counters.trunk_tokens_unshared == 3 * 8 * 770
    assert counters.trunk_tokens_read == 3 * (4 * 770 - 3 * 512)
    alone = run(make_core(tiny("llama"), max_model_len=1024), questions)
    assert {name: one.tokens for name, one in together.items()} == {name: one.tokens for name, one in alone.items()}


@pytest.mark.parametrize("recorder", [Repeating(), None], ids=["graphs", "launches"])
def test_rows_that_are_not_finite_fail_their_group_alone(recorder: Repeating | None, tiny: Tiny) -> None:
    parts = cuda_parts(tiny("llama"), recorder=recorder)
    assert isinstance(parts.runner, CudaRunner)
    embeddings = parts.runner.model.get_input_embeddings()
    assert isinstance(embeddings, torch.nn.Embedding)
    with torch.no_grad():
        embeddings.weight[INFINITE_TOKEN] = float("inf")
    prompt = [8 if token == INFINITE_TOKEN else token for token in prompt_of(40)]
    well = group("well", prompt, n=2, seed=3, logit_bias={INFINITE_TOKEN: -100.0})
    drawn, read = (
        group("drawn", prompt, n=2, logit_bias={INFINITE_TOKEN: 100.0}),
        group("read", [*prompt, INFINITE_TOKEN, 9]),
    )
    outcomes = run(EngineCore(parts.info, parts.runner, options=parts.options), [well, drawn, read])
    assert [type(outcomes[name].error) for name in ("drawn", "read")] == [EngineError, EngineError]
    assert outcomes["well"].tokens == run(make_core(tiny("llama")), [well])["well"].tokens


def test_answers_are_copied_into_the_prefix_cache(tiny: Tiny) -> None:
    core = core_over(tiny("llama"), None, cache_answers=True)
    prompt = prompt_of(83)
    answer = run(core, [group("ask", prompt, max_tokens=30)])["ask"].tokens[0]
    again = run(core, [group("again", [*prompt, *answer, 5, 6, 7], max_tokens=30, temperature=0.0)])["again"]
    assert again.prompt is not None and again.prompt.cached_tokens == 112
    fresh = run(make_core(tiny("llama")), [group("f", [*prompt, *answer, 5, 6, 7], max_tokens=30, temperature=0.0)])
    assert again.tokens == fresh["f"].tokens


@pytest.mark.parametrize("name", ["Granite", "Starcoder2", "SeedOss"])
def test_parts_without_a_kernel_keep_torchs_operators(name: str, tmp_path: Path) -> None:
    """LayerNorm and MLPs without a gate."""
    folder, prompt = save_tiny_architecture(name, tmp_path), prompt_of(40)
    core = core_over(folder, Repeating(), kv_cache_gb=gb_of(512))
    outcome = run(core, [group("g", prompt, n=2, temperature=0.0, max_tokens=12)])["g"]
    assert outcome.tokens[0] == outcome.tokens[1] == Reference(folder).greedy(prompt, 12)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("GPTNeoX", "a single product of queries, keys and values"),
        ("Glm4", "RoPE that is not of complete heads"),
        ("SmolLM3", "RoPE that is not of complete heads"),
        ("Olmo2", "another norm of heads"),
        ("GptOss", "attention sinks"),
    ],
)
def test_attention_without_a_kernel_is_refused_before_the_model_is_changed(
    name: str, reason: str, tmp_path: Path
) -> None:
    folder = save_tiny_architecture(name, tmp_path)
    model = load_model(folder, read_config(folder), dtype=torch.float32, device=torch.device("cpu"))
    before = {path: id(module) for path, module in model.named_modules()}
    with pytest.raises(StructureError, match=reason):
        fuse(model, PLAIN, structure=read_structure(model, max_positions=1000))
    assert {path: id(module) for path, module in model.named_modules()} == before
