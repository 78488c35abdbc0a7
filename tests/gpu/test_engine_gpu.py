"""The engine on a GPU: tests of `tests/engines/native` that hold on every device, and tests that need a GPU.

A GPU does not promise identical bits, because the bits of a row depend on the number of rows in the batch. The tests
require that float32 texts equal the texts of `transformers.generate`, unless two tokens are equally likely within
rounding error; that logits are close with any other rows; and that the same steps give the same bits.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from motet.engines.native.build import build_parts
from motet.engines.native.core import EngineCore
from motet.types import ChoiceStart
from tests.devices import GPU, ON_GPU
from tests.engines.native.drive import GroupOutcome, build_core, group, make_core, prompt_of, run, take_step
from tests.engines.native.recorder import LogitsRecorder, recorded
from tests.tiny_engine import engine_config
from tests.tiny_models import FAMILIES, Reference, assert_greedy_equal, save_tiny_model

pytestmark = list(ON_GPU)

NEW_TOKENS = 60
SIZES = {5: 1, 64: 5, 33: 2, 130: 3}
"""Number of choices, by prompt length."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "launches"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_groups_with_preemption_and_chunks_equal_generate(family: str, eager: bool, tmp_path: Path) -> None:
    folder = save_tiny_model(family, tmp_path)
    reference = Reference(folder, GPU)
    core = make_core(folder, device=GPU, blocks=70, max_model_len=256, budget=48, max_num_seqs=24, enforce_eager=eager)
    requests = [
        group(f"{length}", prompt_of(length, length), n=n, max_tokens=NEW_TOKENS, top_k=1)
        for length, n in SIZES.items()
    ]
    outcomes = run(core, requests, stagger=3)
    assert core.counters.preemptions > 0
    for length, n in SIZES.items():
        prompt = prompt_of(length, length)
        expected = reference.greedy(prompt, NEW_TOKENS)
        assert sorted(outcomes[f"{length}"].tokens) == list(range(n))
        for tokens in outcomes[f"{length}"].tokens.values():
            assert_greedy_equal(reference, prompt, tokens, expected)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "launches"])
def test_the_same_steps_give_the_same_bits(eager: bool, llama: Path) -> None:
    """There is no prefix cache: with a hit the second prompt would have fewer rows, which is another step."""
    rows = []
    for _ in range(2):
        core, recorder = on_gpu(llama, dtype="bfloat16", prefix_cache=False, enforce_eager=eager)
        tokens = run(core, [group("g", prompt_of(83), n=8, seed=3), group("h", prompt_of(30), n=3, seed=30)])[
            "g"
        ].tokens
        assert len({tuple(some) for some in tokens.values()}) == 8
        rows.append(recorder.rows)
    assert rows[0].keys() == rows[1].keys()
    assert all(torch.equal(row, rows[1][key]) for key, row in rows[0].items())


def test_logits_are_close_and_tokens_equal_with_any_other_groups_in_float32(llama: Path) -> None:
    alone, others = on_gpu(llama), group("others", prompt_of(33, 7), n=5, seed=30_000, max_tokens=25)
    seeds = [100, 103, 106]
    singles = {
        seed: run(alone[0], [group("one", prompt_of(83), seed=seed, max_tokens=NEW_TOKENS)])["one"].tokens[0]
        for seed in seeds
    }
    requested = group("g", prompt_of(83), n=7, seed=100, max_tokens=NEW_TOKENS)
    bytes_per_block = alone[0].info.bytes_per_block
    companies = {
        "in a group": on_gpu(llama),
        "launched": on_gpu(llama, enforce_eager=True),
        "in chunks": on_gpu(llama, max_num_batched_tokens=37, max_num_seqs=37),
        "preempted": on_gpu(llama, max_model_len=256, kv_cache_gb=bytes_per_block * 64 / 2**30),
    }
    for name, (core, recorder) in companies.items():
        tokens = run(core, [others, requested])["g"].tokens
        assert {seed: tokens[seed - 100] for seed in seeds} == singles, name
        assert (core.counters.preemptions > 0) == (name == "preempted")
        for key in alone[1].rows:
            torch.testing.assert_close(recorder.rows[key], alone[1].rows[key], atol=1e-3, rtol=1e-3)


def test_a_resumed_choice_continues_with_the_same_tokens_in_float32(llama: Path) -> None:
    undisturbed = run(on_gpu(llama)[0], [group("g", prompt_of(83), n=3, seed=5, max_tokens=NEW_TOKENS)])["g"].tokens
    starts = [ChoiceStart(0, 5, tuple(undisturbed[0][:17])), ChoiceStart(1, 6, tuple(undisturbed[1][:40]))]
    core, _ = on_gpu(llama)
    resumed = run(core, [group("g", prompt_of(83), starts=starts, max_tokens=NEW_TOKENS)])["g"].tokens
    assert core.counters.replayed_tokens > 0
    assert [resumed[0], resumed[1]] == [undisturbed[0][17:], undisturbed[1][40:]]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_in_bfloat16_kernels_and_graphs_are_as_close_as_torchs_operators(family: str, tmp_path: Path) -> None:
    folder, prompt = save_tiny_model(family, tmp_path), prompt_of(130)
    answer = tuple(prompt_of(40, 9))
    starts = [ChoiceStart(i, i, answer[: 10 + i]) for i in range(6)]
    requests = [group("g", prompt, starts=starts, max_tokens=60), group("first", prompt, n=3, seed=50, max_tokens=1)]
    exact = Reference(folder, GPU)
    errors = {}
    for kernels in ("auto", "torch"):
        core, recorder = on_gpu(folder, dtype="bfloat16", kernels=kernels)
        run(core, requests)
        expected = {(i, 130 + 10 + i): exact.logits([*prompt, *answer[: 10 + i]])[-1] for i in range(6)}
        expected |= {(seed, 130): exact.logits(prompt)[-1] for seed in (50, 51, 52)}
        off = [float((recorder.rows[key].float() - row).norm() / row.norm()) for key, row in expected.items()]
        errors[kernels] = sum(off) / len(off)
    assert errors["auto"] < 1.5 * errors["torch"] + 1e-3, errors


def test_a_step_waits_for_the_device_once(llama: Path) -> None:
    core, outcomes = make_core(llama, device=GPU, dtype="bfloat16"), {"g": GroupOutcome(), "h": GroupOutcome()}
    core.submit(group("g", prompt_of(83), n=8, max_tokens=60, temperature=0.8, top_k=40, presence_penalty=0.5))
    core.submit(group("h", prompt_of(20), n=2, max_tokens=60, logprobs=3, logit_bias={5: 2.0}))
    for _ in range(4):
        take_step(core, outcomes)
    with counted_waits() as found:
        take_step(core, outcomes)
    assert len(found) == 1, [str(one.message) for one in found]


@contextmanager
def counted_waits() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_cache_fills_the_given_part_of_the_gpu(llama: Path) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    used = total - torch.cuda.mem_get_info(0)[0]
    core = build_core(engine_config(llama, device=GPU, gpu_memory_utilization=used / total + 0.05))
    held = core.info.num_blocks * core.info.bytes_per_block
    assert 0.9 < held / (0.05 * total) < 1.1
    assert len(run(core, [group("g", prompt_of(83), n=3, max_tokens=5)])["g"].tokens) == 3


def test_the_fingerprint_promises_only_similar_texts(llama: Path) -> None:
    assert build_parts(engine_config(llama, device=GPU)).info.fingerprint.endswith("-similar")


def on_gpu(folder: Path, **changes: object) -> tuple[EngineCore, LogitsRecorder]:
    return recorded(engine_config(folder, device=GPU, **changes))
