"""An engine with adapters generates the same tokens as models with merged adapters, with the same bits whatever runs
next to them, and never uses KV that another adapter, or the base model, has computed."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from motet.engines.native.build import Parts, build_parts
from motet.engines.native.checks.reference import difference_of
from motet.engines.native.core import EngineCore
from motet.errors import ConfigError, ModelGoneError, ModelNotFoundError, RequestError
from motet.ids import ModelName
from motet.types import ChoiceStart, GenerateRequest
from tests.engines.native.adapter_files import load_order, merge, save_adapter
from tests.engines.native.drive import GroupOutcome, gb_of, group, prompt_of, run, take_step
from tests.engines.native.pair import CorePair, with_ticket
from tests.engines.native.recorder import recorded_over
from tests.tiny_architectures import save_tiny_architecture
from tests.tiny_engine import engine_config
from tests.tiny_models import Reference, assert_greedy_equal

Tiny = Callable[[str], Path]
TORCH = {"kernels": "torch"}
SLOW, KERNELS = pytest.mark.slow, pytest.mark.kernels
FLOAT32 = [
    pytest.param({"dtype": "float32", "kernels": "torch"}, id="float32 by torch"),
    pytest.param({"dtype": "float32"}, marks=KERNELS, id="float32"),
]
NUMBERS = [
    *FLOAT32,
    pytest.param({"dtype": "bfloat16"}, marks=KERNELS, id="bfloat16"),
    pytest.param({"dtype": "bfloat16", "kernels": "torch"}, marks=SLOW, id="bfloat16 by torch"),
    pytest.param({"dtype": "bfloat16", "quantization": "int8"}, marks=[KERNELS, SLOW], id="int8"),
]
DIFFERENCES = {"float32": 1e-4, "bfloat16": 0.08, "int8": 0.15}
PROMPT, STEPS = prompt_of(43, 1), 10
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {},
    "some": {"targets": ("q_proj", "up_proj"), "rank": 9, "seed": 1, "use_rslora": True},
    "down": {"targets": ("down_proj", "v_proj", "o_proj"), "rank": 33, "seed": 2},
}


@pytest.fixture(scope="module")
def adapters(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns the folder of an adapter of a family's tiny model: one of `ADAPTERS`, or one with these properties."""
    made: dict[str, Path] = {}

    def folder(name: str, family: str = "llama", **properties: Any) -> Path:
        key = f"{family}-{name}-{properties}"
        if key not in made:
            fields = ADAPTERS.get(name, {}) | properties
            made[key] = save_adapter(tiny(family), tmp_path_factory.mktemp("adapter"), **fields)
        return made[key]

    return folder


def parts_of(folder: Path, numbers: dict[str, Any], **changes: Any) -> Parts:
    kv_cache_gb = gb_of(256, 4 if numbers.get("dtype", "float32") == "float32" else 2)
    return build_parts(engine_config(folder, **{"kv_cache_gb": kv_cache_gb, **numbers, **changes}))


def core_of(parts: Parts) -> EngineCore:
    return EngineCore(parts.info, parts.runner, options=parts.options)


def load(core: EngineCore, parts: Parts, name: str, folder: Path, *, in_place: bool = False, **fields: Any) -> None:
    core.adapters.load(parts.adapters.load(load_order(name, folder, **fields)), in_place=in_place)
    core.check()


def request(name: str, model: str = "", **fields: Any) -> GenerateRequest:
    fields = {"prompt": PROMPT, **fields}
    return msgspec.structs.replace(group(name, fields.pop("prompt"), **fields), model=ModelName(model))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=SLOW), pytest.param("qwen2", marks=SLOW)])
@pytest.mark.parametrize("numbers", FLOAT32)
def test_adapters_generate_as_merged_models(
    numbers: dict[str, Any], family: str, tiny: Tiny, adapters: Callable[..., Path], tmp_path: Path
) -> None:
    """The base model and three adapters run in one step."""
    base = tiny(family)
    parts = parts_of(base, numbers, adapters=[f"{name}={adapters(name, family)}" for name in ADAPTERS])
    core = core_of(parts)
    assert [adapter.name for adapter in core.info.adapters] == [*ADAPTERS]
    outcomes = run(core, [request(name or "base", name, max_tokens=30, temperature=0.0) for name in ("", *ADAPTERS)])
    answers = set()
    for name in ("", *ADAPTERS):
        merged = merge(base, adapters(name, family), tmp_path / name) if name else base
        reference, tokens = Reference(merged), outcomes[name or "base"].tokens[0]
        assert_greedy_equal(reference, PROMPT, tokens, reference.greedy(PROMPT, 30))
        answers.add(tuple(tokens))
    assert len(answers) == 4


@SLOW
@pytest.mark.parametrize("architecture", ["Phi3", "GPTNeoX", "Nemotron", "Cohere", "Qwen2Moe", "OPT"])
def test_all_linear_layers_of_an_architecture_can_have_adapters(architecture: str, tmp_path: Path) -> None:
    """Fused and interleaved layers, plain feed-forward parts, parallel layers, shared experts and flat rows."""
    base = save_tiny_architecture(architecture, tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", targets=(), rank=5, size=0.2)
    parts = parts_of(base, {"kernels": "torch" if architecture == "Qwen2Moe" else "auto"}, kv_cache_gb=0.1)
    core = core_of(parts)
    load(core, parts, "a", adapter)
    outcomes = run(core, [request(name or "base", name, max_tokens=20, temperature=0.0) for name in ("", "a")])
    for name, folder in {"base": base, "a": merge(base, adapter, tmp_path / "merged")}.items():
        reference = Reference(folder)
        assert_greedy_equal(reference, PROMPT, outcomes[name].tokens[0], reference.greedy(PROMPT, 20))
    assert outcomes["base"].tokens != outcomes["a"].tokens


@pytest.mark.slow
@pytest.mark.parametrize("numbers", NUMBERS)
def test_logits_are_close_to_the_logits_of_merged_models(
    numbers: dict[str, Any], tiny: Tiny, adapters: Callable[..., Path], tmp_path: Path
) -> None:
    parts = parts_of(tiny("llama"), numbers)
    core, recorder = recorded_over(parts)
    limit = DIFFERENCES[numbers.get("quantization", numbers["dtype"])]
    for name in ADAPTERS:
        load(core, parts, name, adapters(name))
        tokens = run(core, [request("g", name, seed=5)])["g"].tokens[0]
        expected = Reference(merge(tiny("llama"), adapters(name), tmp_path / name)).logits([*PROMPT, *tokens])
        found = torch.stack([recorder.rows[5, len(PROMPT) + place] for place in range(len(tokens))]).float()
        base = Reference(tiny("llama")).logits([*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
        assert difference_of(found, expected[len(PROMPT) - 1 : -1]) < limit < difference_of(base, found)


@pytest.mark.slow
@pytest.mark.parametrize("numbers", NUMBERS)
def test_bits_of_a_choice_do_not_depend_on_what_runs_next_to_it(
    numbers: dict[str, Any], tiny: Tiny, adapters: Callable[..., Path]
) -> None:
    """Alone, in a group, next to other adapters and the base model, in chunks, and preempted. A zero B changes no
    bit."""
    base = tiny("llama")
    parts = parts_of(base, numbers)
    names = {"all": "all", "some": "some", "": "", "zero": ""}

    def loaded(over: Parts) -> tuple[EngineCore, dict[tuple[int, int], torch.Tensor]]:
        core, recorder = recorded_over(over)
        for name in ("all", "some", "down"):
            load(core, over, name, adapters(name))
        load(core, over, "zero", adapters("zero", size=0.0))
        return core, recorder.rows

    core, alone = loaded(parts)
    for number, name in enumerate(names):
        run(core, [request("one", name, seed=100 * number + 1, max_tokens=40)])
    others = [request("down", "down", seed=1000, n=2, max_tokens=25, prompt=prompt_of(61, 3))]
    together = [
        request(name or "base", name, seed=100 * number, n=3, max_tokens=40) for number, name in enumerate(names)
    ]
    ways: dict[str, dict[str, Any]] = {
        "next to others": {},
        "in chunks": {"max_num_batched_tokens": 19},
        "preempted": {"max_model_len": 128, "kv_cache_gb": core.info.bytes_per_block * 62 / 2**30},
    }
    for way, changes in ways.items():
        other, rows = loaded(parts_of(base, numbers, **changes) if changes else parts)
        run(other, [*others, *together], stagger=2)
        assert (other.counters.preemptions > 0) == (way == "preempted"), way
        different = [key for key, logits in alone.items() if not torch.equal(logits, rows[key])]
        assert len(alone) >= 160 and not different, (way, different[:3])
    for (seed, position), logits in alone.items():
        if seed == 201:
            assert position != len(PROMPT) or torch.equal(logits, alone[301, position])


@pytest.mark.slow
@pytest.mark.parametrize("numbers", NUMBERS)
def test_scores_of_each_adapter_are_those_of_an_engine_without_a_cache(
    numbers: dict[str, Any], tiny: Tiny, adapters: Callable[..., Path]
) -> None:
    """Together with other groups, from the cache, preempted, and after an adapter was replaced."""
    prompts = [PROMPT, (*PROMPT[:30], 5, 6), (*PROMPT, 7)]
    requests = [
        request(f"{model or 'base'}-{place}", model, prompt=prompt, prompt_logprobs=2, n=2, seed=place, max_tokens=30)
        for place, prompt in enumerate(prompts)
        for model in ("", "a", "b")
    ]

    def scores(core: EngineCore, stagger: int) -> dict[str, object]:
        outcomes = run(core, requests, stagger=stagger)
        return {name: outcome.prompt and outcome.prompt.parts for name, outcome in outcomes.items()}

    def loaded(**changes: Any) -> tuple[EngineCore, Parts]:
        parts = parts_of(tiny("llama"), numbers, max_num_batched_tokens=24, **changes)
        core = core_of(parts)
        for name, adapter in (("a", "all"), ("b", "some")):
            load(core, parts, name, adapters(adapter))
        return core, parts

    alone, own_parts = loaded(prefix_cache=False)
    small = {"max_model_len": 128, "kv_cache_gb": alone.info.bytes_per_block * 26 / 2**30}
    core, parts = loaded(**small)
    for adapter in ("all", "down"):
        load(core, parts, "a", adapters(adapter), in_place=True)
        load(alone, own_parts, "a", adapters(adapter), in_place=True)
        expected = scores(alone, 100)
        assert len({str(found) for found in expected.values()}) == len(requests) and all(expected.values())
        assert scores(core, 1) == expected == scores(core, 3)
    assert core.counters.preemptions > 0 and core.stats().cached_tokens > 0


@pytest.mark.slow
def test_kv_is_never_shared_between_adapters(tiny: Tiny, adapters: Callable[..., Path]) -> None:
    """Equal prompts, with and without a full block, in the prefix cache, running, and kept."""
    parts = parts_of(tiny("llama"), TORCH)
    core = core_of(parts)
    load(core, parts, "a", adapters("all"))
    load(core, parts, "b", adapters("down"))

    def cached(model: str, **fields: Any) -> int:
        report = run(core, [request("g", model, max_tokens=2, **fields)])["g"].prompt
        assert report is not None
        return report.cached_tokens

    assert [cached(model) for model in ("a", "b", "", "a", "b", "tiny")] == [0, 0, 0, 40, 40, 40]
    short = prompt_of(5, 2)
    kept = [request(f"{model}", model, prompt=short, max_tokens=9) for model in ("a", "b", "")]
    answers = run(core, [msgspec.structs.replace(one, keep_s=60.0) for one in kept])
    assert len({tuple(answers[name].tokens[0]) for name in ("a", "b", "")}) == 3
    assert core.stats().trunks_kept == 3
    assert [cached(model, prompt=short) for model in ("a", "b", "")] == [4, 4, 4]
    load(core, parts, "a", adapters("some"), in_place=True)
    assert core.stats().trunks_kept == 2
    assert [cached(model, prompt=short) for model in ("a", "b", "")] == [0, 4, 4]
    assert [cached("a"), cached("a")] == [0, 40]
    load(core, parts, "a", adapters("all"), in_place=True)
    assert cached("a") == 40, "the first adapter's blocks are found again"


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_groups_continue_with_a_new_adapter_as_if_it_had_been_loaded_before(
    prefix_cache: bool, tiny: Tiny, adapters: Callable[..., Path]
) -> None:
    """One group generates, one waits for its prompt, and one comes later. Groups of the base model lose nothing."""
    parts = parts_of(tiny("llama"), TORCH, prefix_cache=prefix_cache, max_num_batched_tokens=48)
    core = core_of(parts)
    load(core, parts, "a", adapters("all"))
    outcomes = {name: GroupOutcome() for name in ("begun", "waiting", "base")}
    core.submit(request("begun", "a", n=3, seed=50, max_tokens=30))
    core.submit(request("base", n=2, max_tokens=30))
    for _ in range(STEPS):
        take_step(core, outcomes)
    core.submit(request("waiting", "a", n=2, seed=70))
    written = {index: tuple(tokens) for index, tokens in outcomes["begun"].tokens.items()}
    assert len(written) == 3 and all(len(tokens) > 2 for tokens in written.values())
    replayed = core.counters.replayed_tokens
    load(core, parts, "a", adapters("down"), in_place=True, version="2")
    while core.busy:
        take_step(core, outcomes)
    assert core.info.adapters[0].version == "2"
    assert core.counters.replayed_tokens - replayed == sum(map(len, written.values())) - 3

    fresh = core_of(parts)
    load(fresh, parts, "a", adapters("down"))
    starts = [ChoiceStart(index, 50 + index, tokens) for index, tokens in written.items()]
    resumed = run(
        fresh,
        [
            request("begun", "a", starts=starts, max_tokens=30),
            request("waiting", "a", n=2, seed=70),
            request("base", n=2, max_tokens=30),
        ],
    )
    for index, tokens in written.items():
        assert outcomes["begun"].tokens[index] == [*tokens, *resumed["begun"].tokens[index]]
    assert outcomes["waiting"].tokens == resumed["waiting"].tokens
    assert outcomes["base"].tokens == resumed["base"].tokens


@pytest.mark.slow
def test_groups_of_an_unloaded_adapter_end_and_then_its_memory_is_free(
    tiny: Tiny, adapters: Callable[..., Path]
) -> None:
    parts = parts_of(tiny("llama"), TORCH, max_adapters=1)
    core = core_of(parts)
    adapter = parts.adapters.load(load_order("a", adapters("all")))
    core.adapters.load(adapter, in_place=False)
    expected = run(core, [request("g", "a", max_tokens=20)])["g"].tokens
    outcomes = {"g": GroupOutcome()}
    core.submit(msgspec.structs.replace(request("g", "a", max_tokens=20), keep_s=60.0))
    take_step(core, outcomes)
    assert core.adapters.unload(ModelName("a")).adapters == ()
    with pytest.raises(ModelGoneError):
        core.submit(request("h", "a"))
    with pytest.raises(RequestError, match="1 unloaded ones are still in use"):
        core.adapters.check(ModelName("b"), in_place=False)
    held = weakref.ref(adapter)
    del adapter
    while core.busy:
        take_step(core, outcomes)
    assert outcomes["g"].tokens == expected
    gc.collect()
    assert held() is None
    load(core, parts, "a", adapters("all"))
    with pytest.raises(RequestError, match="--max-adapters") as refused:
        core.adapters.check(ModelName("b"), in_place=False)
    assert refused.value.code == "too_many_adapters"
    with pytest.raises(RequestError, match="load_inplace") as refused:
        core.adapters.check(ModelName("a"), in_place=False)
    assert refused.value.code == "adapter_exists"
    with pytest.raises(RequestError):
        core.adapters.check(core.info.model, in_place=True)
    with pytest.raises(ModelNotFoundError):
        core.adapters.unload(ModelName("b"))


@pytest.mark.slow
def test_an_equal_adapter_that_is_loaded_again_costs_nothing(tiny: Tiny, adapters: Callable[..., Path]) -> None:
    """Groups of an adapter that was replaced or unloaded use the new copy, so that the old one is freed."""
    parts = parts_of(tiny("llama"), TORCH)
    core = core_of(parts)
    outcomes = {"g": GroupOutcome()}
    load(core, parts, "a", adapters("all"))
    core.submit(request("g", "a", max_tokens=20))
    for in_place in (True, False):
        take_step(core, outcomes)
        if not in_place:
            core.adapters.unload(ModelName("a"))
        load(core, parts, "a", adapters("all"), in_place=in_place, version=f"{in_place}")
    while core.busy:
        take_step(core, outcomes)
    assert core.counters.replayed_tokens == 0 and core.info.adapters[0].version == "False"


@pytest.mark.slow
@pytest.mark.parametrize("numbers", FLOAT32)
def test_loads_and_unloads_leave_nothing(numbers: dict[str, Any], tiny: Tiny, adapters: Callable[..., Path]) -> None:
    parts = parts_of(tiny("llama"), numbers)
    core = core_of(parts)
    held: list[weakref.ref[object]] = []
    for number in range(100):
        adapter = parts.adapters.load(load_order("a", adapters("all" if number % 2 else "down")))
        held.append(weakref.ref(adapter.weights))
        core.adapters.load(adapter, in_place=number % 3 == 1)
        if number % 10 == 0:
            run(core, [request("g", "a", max_tokens=3)])
        if number % 3 != 0:
            core.adapters.unload(ModelName("a"))
    if core.info.adapters:
        core.adapters.unload(ModelName("a"))
    del adapter
    gc.collect()
    assert not [one for one in held if one() is not None]


@pytest.mark.slow
def test_a_ticket_for_another_adapter_is_not_used(tiny: Tiny, adapters: Callable[..., Path]) -> None:
    pair = CorePair(tiny("llama"), kernels="torch")
    for core, parts in ((pair.p, pair.parts["P"]), (pair.d, pair.parts["D"])):
        load(core, parts, "a", adapters("all"))
    pair.hand_over(request("fits", "a", max_tokens=5))
    pair.finish()
    assert pair.d.counters.transfers == 1
    ticket = pair.prefill(request("old", "a", max_tokens=5, prompt=prompt_of(40, 8)))
    load(pair.d, pair.parts["D"], "a", adapters("down"), in_place=True)
    pair.submit(with_ticket(request("old", "a", max_tokens=5, prompt=prompt_of(40, 8)), ticket))
    base = pair.prefill(request("base", max_tokens=5, prompt=prompt_of(40, 9)))
    pair.submit(with_ticket(request("base", "a", max_tokens=5, prompt=prompt_of(40, 9)), base))
    pair.finish()
    assert pair.d.counters.transfer_failures == {"weights": 2} and pair.d.counters.transfers == 1
    pair.check_empty()


@pytest.mark.slow
def test_a_weight_update_keeps_adapters(tiny: Tiny, adapters: Callable[..., Path]) -> None:
    parts = parts_of(tiny("llama"), TORCH)
    core = core_of(parts)
    load(core, parts, "a", adapters("all"))
    before = run(core, [request("g", "a")])["g"]
    core.update(msgspec.structs.replace(core.info, block_weights="new"), lambda: None)
    after = run(core, [request("g", "a")])["g"]
    assert before.tokens == after.tokens and core.info.adapters
    assert after.prompt is not None and after.prompt.cached_tokens == 0, "blocks of other weights have other names"


@pytest.mark.slow
def test_a_start_with_an_adapter_that_cannot_be_used_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--adapter a={tmp_path}: .*adapter_config.json is missing"):
        parts_of(tiny("llama"), TORCH, adapters=[f"a={tmp_path}"])
    with pytest.raises(ConfigError, match="--max-adapters"):
        parts_of(tiny("llama"), TORCH, adapters=["a=x", "b=x"], max_adapters=1)
