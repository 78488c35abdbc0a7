"""A choice is the same alone, in a group, among strangers, in chunks, after a prefix hit, a preemption or a resume.

Tokens are compared with tokens and, stronger, every row of logits a token was drawn from with the same row bit for bit:
two runs can draw equal tokens from logits that are only nearly equal, and part a thousand tokens later.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.types import ChoiceStart, GenerateRequest
from tests.engines.native.drive import Outcome, engine_config, group, make_core, prompt_of, run
from tests.engines.native.recorder import RowKey, recorded

Tiny = Callable[[str], Path]

LENGTH, NEW_TOKENS = 83, 90
SLOW = pytest.mark.slow
SOME_FAMILIES = ("llama", *(pytest.param(family, marks=SLOW) for family in ("qwen3", "mistral", "gemma2", "gemma3")))
NUMBERS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 by torch": {"dtype": "bfloat16", "kernels": "torch"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}
BY_NUMBERS = pytest.mark.parametrize(
    "numbers",
    [fields if name == "bfloat16" else pytest.param(fields, marks=SLOW) for name, fields in NUMBERS.items()],
    ids=NUMBERS,
)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalised": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
}


def one(seed: int, way: str = "plain", *, name: str = "one", prompt: tuple[int, ...] | None = None) -> GenerateRequest:
    """The n=1 request with `seed`."""
    return group(name, prompt or prompt_of(LENGTH), seed=seed, max_tokens=NEW_TOKENS, **WAYS[way])


def strangers() -> list[GenerateRequest]:
    """Groups of other shapes and sampling, with other seeds."""
    return [
        group("s1", prompt_of(150, 9), n=3, seed=10_000, max_tokens=40, top_p=0.8),
        group("s2", prompt_of(7, 8), n=1, seed=20_000, max_tokens=70, temperature=0.0),
        group("s3", prompt_of(33, 7), n=5, seed=30_000, max_tokens=25, repetition_penalty=1.3, logprobs=3),
    ]


def assert_same_rows(
    rows: dict[RowKey, torch.Tensor], reference: dict[RowKey, torch.Tensor], seeds: Iterable[int]
) -> None:
    """Bit for bit, every row of the seeds."""
    for seed in seeds:
        keys = [key for key in reference if key[0] == seed]
        assert len(keys) >= NEW_TOKENS
        different = [key for key in keys if not torch.equal(rows[key], reference[key])]
        assert not different, f"{len(different)} of {len(keys)} rows of seed {seed} differ, the first {different[0]}"


@BY_NUMBERS
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_logits_are_the_same_bits_in_every_company(family: str, numbers: dict[str, Any], tiny: Tiny) -> None:
    core, alone = recorded(engine_config(tiny(family), **numbers))
    seeds = [100, 101, 104, 106]
    singles = {seed: run(core, [one(seed)])["one"].tokens[0] for seed in seeds}
    core.check()
    whole = group("g", prompt_of(LENGTH), n=7, seed=100, max_tokens=NEW_TOKENS)
    companies: dict[str, tuple[dict[str, Any], list[GenerateRequest]]] = {
        "in a group": ({}, [whole]),
        "among strangers": ({}, [*strangers(), whole]),
        "in chunks": ({"max_num_batched_tokens": 37, "max_num_seqs": 37}, [*strangers(), whole]),
        "preempted": (
            {"max_model_len": 256, "kv_cache_gb": core.info.bytes_per_block * 64 / 2**30},
            [whole, *strangers()],
        ),
    }
    for name, (changes, requests) in companies.items():
        other, rows = recorded(engine_config(tiny(family), **numbers, **changes))
        outcome = run(other, requests)["g"]
        assert (other.counters.preemptions > 0) == (name == "preempted"), name
        assert {seed: outcome.tokens[seed - 100] for seed in seeds} == singles, name
        assert_same_rows(rows.rows, alone.rows, seeds)


@BY_NUMBERS
@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_a_resumed_choice_goes_on_as_if_it_had_never_stopped(family: str, numbers: dict[str, Any], tiny: Tiny) -> None:
    core, whole = recorded(engine_config(tiny(family), **numbers))
    undisturbed = run(core, [group("g", prompt_of(LENGTH), n=4, seed=5, max_tokens=NEW_TOKENS)])["g"].tokens
    for written in (1, 17, 64, 71):
        resumed, rows = recorded(engine_config(tiny(family), **numbers))
        starts = [
            ChoiceStart(0, 5, tuple(undisturbed[0][:written])),
            ChoiceStart(2, 7, tuple(undisturbed[2][: written + 3])),
            ChoiceStart(3, 8, ()),
        ]
        outcome = run(resumed, [group("g", prompt_of(LENGTH), starts=starts, max_tokens=NEW_TOKENS), *strangers()])["g"]
        assert outcome.tokens[0] == undisturbed[0][written:]
        assert outcome.tokens[2] == undisturbed[2][written + 3 :]
        assert outcome.tokens[3] == undisturbed[3]
        assert all(torch.equal(rows.rows[key], whole.rows[key]) for key in rows.rows if key[0] in (5, 7, 8))
        assert resumed.counters.replayed_tokens > 0


@BY_NUMBERS
@pytest.mark.parametrize("way", [pytest.param(way, marks=SLOW) if way != "plain" else way for way in WAYS])
@pytest.mark.parametrize("n", [*(pytest.param(n, marks=SLOW) for n in (1, 2, 7)), 32])
def test_choice_i_of_a_group_is_the_single_request_with_seed_s_plus_i(
    n: int, way: str, numbers: dict[str, Any], tiny: Tiny
) -> None:
    core = make_core(tiny("llama"), **numbers)
    outcome = run(core, [group("g", prompt_of(LENGTH), n=n, seed=2**64 - 2, max_tokens=NEW_TOKENS, **WAYS[way])])["g"]
    for i in sorted({0, 1, 2, n // 2, n - 1} & set(range(n))):
        seed = (2**64 - 2 + i) % 2**64
        assert run(core, [one(seed, way)])["one"].tokens[0] == outcome.tokens[i], f"choice {i} of {n}"
    assert len({tuple(tokens) for tokens in outcome.tokens.values()}) == n, "seeds that differ give answers that differ"


@BY_NUMBERS
def test_a_prefix_hit_gives_the_same_bits(numbers: dict[str, Any], tiny: Tiny) -> None:
    cold, cold_rows = recorded(engine_config(tiny("llama"), **numbers, prefix_cache=False))
    expected = run(cold, [one(77)])["one"]
    warm, warm_rows = recorded(engine_config(tiny("llama"), **numbers, max_num_batched_tokens=64))
    # Three ways to have met the prefix: a shorter prompt, a longer one with another end, and an answer in between.
    run(warm, [group("short", prompt_of(LENGTH)[:41], max_tokens=30), *strangers()])
    run(warm, [group("long", prompt_of(LENGTH)[:60] + prompt_of(90, 4), n=2, max_tokens=3)])
    outcome = run(warm, [one(77)])["one"]
    assert outcome.prompt is not None and outcome.prompt.cached_tokens == 56
    assert outcome.tokens == expected.tokens
    assert_same_rows(warm_rows.rows, cold_rows.rows, [77])


def test_another_salt_finds_nothing(tiny: Tiny) -> None:
    core = make_core(tiny("llama"))

    def cached(salt: str) -> int:
        report = run(core, [group(f"salt {salt}", prompt_of(LENGTH), cache_salt=salt)])[f"salt {salt}"].prompt
        assert report is not None
        return report.cached_tokens

    assert [cached(""), cached("a"), cached(""), cached("a"), cached("b")] == [0, 0, 80, 80, 0]


def test_answers_enter_the_prefix_cache_only_when_asked(tiny: Tiny) -> None:
    for cache_answers in (False, True):
        core = make_core(tiny("llama"), cache_answers=cache_answers)
        prompt = prompt_of(LENGTH)
        answer = run(core, [group("ask", prompt, max_tokens=30)])["ask"].tokens[0]
        again: Outcome = run(core, [group("again", [*prompt, *answer, 5, 6, 7], max_tokens=30, temperature=0.0)])[
            "again"
        ]
        fresh = run(make_core(tiny("llama")), [group("f", [*prompt, *answer, 5, 6, 7], max_tokens=30, temperature=0.0)])
        assert again.prompt is not None
        assert again.prompt.cached_tokens == (112 if cache_answers else 80), (
            "112 of 83 + 30 lie in full, computed blocks"
        )
        assert again.tokens == fresh["f"].tokens, "float32: the answer's KV is near enough for greedy decoding"
