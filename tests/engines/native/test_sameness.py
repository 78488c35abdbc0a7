"""A choice is the same alone, in a group, with other groups, in chunks, after a prefix hit, a preemption or a resume.

The tests compare tokens and, as a stronger check, all bits of every row of logits from which a token was sampled: two
runs can sample equal tokens from logits that are only nearly equal, and differ a thousand tokens later.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.engines.native.build import Parts, build_parts
from motet.types import ChoiceStart, GenerateRequest
from tests.engines.native.drive import GroupOutcome, gb_of, group, make_core, prompt_of, run
from tests.engines.native.recorder import RowKey, recorded_over
from tests.pairwise import each_once
from tests.tiny_engine import engine_config

Tiny = Callable[[str], Path]

LENGTH, NEW_TOKENS = 83, 72
"""Lengths of prompts and answers. Attention reads 64 keys of a tail at a time, and answers are longer."""
FIRST_SEED = 2**64 - 2
RESUMED_AFTER = tuple(enumerate((1, 4, 0, 17, 20, 0, 64, 67, 0, 65, 68, 0)))
"""Seeds, and the number of output tokens of each choice when it is resumed."""
COMPARED = (0, 1, 2, 3, 6, 16, 31)
"""The choices of a group that are compared."""
SLOW, KERNELS, LONG = pytest.mark.slow, pytest.mark.kernels, pytest.mark.long
NUMBERS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float32 by torch": {"dtype": "float32", "kernels": "torch"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 by torch": {"dtype": "bfloat16", "kernels": "torch"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}
SOME_NUMBERS = [
    pytest.param(fields, marks=[SLOW, KERNELS] if name == "int8" else [] if name == "bfloat16" else SLOW, id=name)
    for name, fields in NUMBERS.items()
]
BY_NUMBERS = pytest.mark.parametrize("numbers", SOME_NUMBERS)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "allowed": {"allowed_token_ids": tuple(range(20, 200)), "logit_bias": {30: 2.0}, "temperature": 1.5},
    "penalised": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
}


WITH = {
    "llama": ["bfloat16"],
    "qwen3": ["float32"],
    "mistral": ["int8"],
    "gemma2": ["bfloat16 by torch"],
    "gemma3": ["float32 by torch"],
}
"""Number formats with which `make test` runs a family, so that each format runs with some family. The other pairs are
marked `long`. `test_families` compares every family with transformers."""
BY_FAMILY_AND_NUMBERS = pytest.mark.parametrize(
    ("family", "numbers"),
    [
        pytest.param(
            family,
            fields,
            marks=[
                *([] if (family, name) == ("llama", "bfloat16") else [SLOW]),
                *([KERNELS] if name == "int8" else []),
                *([] if name in WITH[family] else [LONG]),
            ],
            id=f"{family}-{name}",
        )
        for family, (name, fields) in product(WITH, NUMBERS.items())
    ],
)


def parts_of(folder: Path, numbers: dict[str, Any], **changes: Any) -> Parts:
    """Builds parts with only as many blocks as the test needs, because all blocks are checked after each step."""
    kv_cache_gb = gb_of(512, 4 if numbers["dtype"] == "float32" else 2)
    return build_parts(engine_config(folder, **{"kv_cache_gb": kv_cache_gb, **numbers, **changes}))


def one(seed: int, way: str = "plain", *, name: str = "one") -> GenerateRequest:
    """Returns the request for one choice with `seed`."""
    return group(name, prompt_of(LENGTH), seed=seed, max_tokens=NEW_TOKENS, **WAYS[way])


def seed_of(choice: int) -> int:
    return (FIRST_SEED + choice) % 2**64


@dataclass(frozen=True)
class Singles:
    """Answers to requests with n = 1, without a prefix cache. They are computed once for all comparisons."""

    folder: Path
    _answers: dict[tuple[object, ...], dict[int, list[int]]] = field(default_factory=dict)

    def tokens(self, numbers: dict[str, Any], way: str) -> dict[int, list[int]]:
        """Returns the tokens of each request, by the number of the choice that it must equal."""
        key = (*numbers.items(), way)
        if key not in self._answers:
            requests = [one(seed_of(choice), way, name=str(choice)) for choice in COMPARED]
            outcomes = run(make_core(self.folder, prefix_cache=False, draft_tokens=0, **numbers), requests)
            self._answers[key] = {choice: outcomes[str(choice)].tokens[0] for choice in COMPARED}
        return self._answers[key]


@pytest.fixture(scope="module")
def singles(tiny: Tiny) -> Singles:
    return Singles(tiny("llama"))


def strangers() -> list[GenerateRequest]:
    """Returns groups with other shapes, other sampling and other seeds."""
    return [
        group("s1", prompt_of(150, 9), n=3, seed=10_000, max_tokens=40, top_p=0.8),
        group("s2", prompt_of(7, 8), n=1, seed=20_000, max_tokens=50, temperature=0.0),
        group("s3", prompt_of(33, 7), n=5, seed=30_000, max_tokens=25, repetition_penalty=1.3, logprobs=3),
    ]


def assert_same_rows(
    rows: dict[RowKey, torch.Tensor], reference: dict[RowKey, torch.Tensor], seeds: Iterable[int]
) -> None:
    """Checks that all rows of these seeds are equal bit for bit."""
    for seed in seeds:
        keys = [key for key in reference if key[0] == seed]
        assert len(keys) >= NEW_TOKENS
        different = [key for key in keys if not torch.equal(rows[key], reference[key])]
        assert not different, f"{len(different)} of {len(keys)} rows of seed {seed} differ, the first {different[0]}"


@pytest.mark.slow
@BY_FAMILY_AND_NUMBERS
def test_logits_have_the_same_bits_whatever_runs_with_them(family: str, numbers: dict[str, Any], tiny: Tiny) -> None:
    parts = parts_of(tiny(family), numbers)
    core, alone = recorded_over(parts)
    seeds = [100, 103, 106]
    singles = {seed: run(core, [one(seed)])["one"].tokens[0] for seed in seeds}
    core.check()
    request = group("g", prompt_of(LENGTH), n=7, seed=100, max_tokens=NEW_TOKENS)
    in_chunks = {"max_num_batched_tokens": 37, "max_num_seqs": 37}
    too_few_blocks = {"max_model_len": 256, "kv_cache_gb": core.info.bytes_per_block * 64 / 2**30}
    companies: dict[str, tuple[Parts, list[GenerateRequest]]] = {
        "in a group": (parts, [request]),
        "among strangers": (parts, [*strangers(), request]),
        "in chunks": (parts_of(tiny(family), numbers, **in_chunks), [*strangers(), request]),
        "preempted": (parts_of(tiny(family), numbers, **too_few_blocks), [request, *strangers()]),
    }
    for name, (over, requests) in companies.items():
        other, rows = recorded_over(over)
        outcome = run(other, requests)["g"]
        assert (other.counters.preemptions > 0) == (name == "preempted"), name
        assert {seed: outcome.tokens[seed - 100] for seed in seeds} == singles, name
        assert_same_rows(rows.rows, alone.rows, seeds)


@pytest.mark.slow
@BY_FAMILY_AND_NUMBERS
def test_a_resumed_choice_continues_as_if_it_had_never_stopped(
    family: str, numbers: dict[str, Any], tiny: Tiny
) -> None:
    """Each group has three choices, one of them fresh. All groups and strangers run at once."""
    parts = parts_of(tiny(family), numbers)
    core, full = recorded_over(parts)
    undisturbed = run(core, [group("g", prompt_of(LENGTH), n=12, max_tokens=NEW_TOKENS)])["g"].tokens
    starts = [ChoiceStart(2 * (seed % 3), seed, tuple(undisturbed[seed][:count])) for seed, count in RESUMED_AFTER]
    groups = [
        group(f"{i}", prompt_of(LENGTH), starts=starts[i : i + 3], max_tokens=NEW_TOKENS) for i in range(0, 12, 3)
    ]
    resumed, rows = recorded_over(parts)
    outcomes = run(resumed, [*groups, *strangers()])
    for one_group in groups:
        for start in one_group.choices:
            rest = outcomes[one_group.request_id].tokens[start.index]
            assert [*start.output_tokens, *rest] == undisturbed[start.seed]
    sampled = [key for key in rows.rows if key[0] in undisturbed]
    assert len(sampled) == sum(NEW_TOKENS - count for _, count in RESUMED_AFTER)
    assert all(torch.equal(rows.rows[key], full.rows[key]) for key in sampled)
    assert resumed.counters.replayed_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "way", "numbers"),
    each_once(
        [32, *(pytest.param(n, marks=SLOW) for n in (1, 2, 7))],
        ["plain", *(pytest.param(way, marks=SLOW) for way in WAYS if way != "plain")],
        sorted(SOME_NUMBERS, key=lambda numbers: numbers.id != "bfloat16"),
    ),
)
def test_choice_i_of_a_group_is_the_single_request_with_seed_s_plus_i(
    n: int, way: str, numbers: dict[str, Any], tiny: Tiny, singles: Singles
) -> None:
    core = make_core(tiny("llama"), **numbers)
    outcome = run(core, [group("g", prompt_of(LENGTH), n=n, seed=FIRST_SEED, max_tokens=NEW_TOKENS, **WAYS[way])])["g"]
    for i, tokens in singles.tokens(numbers, way).items():
        assert i >= n or tokens == outcome.tokens[i], f"choice {i} of {n}"
    assert len({tuple(tokens) for tokens in outcome.tokens.values()}) == n, "different seeds give different answers"


@pytest.mark.slow
@BY_NUMBERS
def test_a_prefix_hit_gives_the_same_bits(numbers: dict[str, Any], tiny: Tiny) -> None:
    cold, cold_rows = recorded_over(parts_of(tiny("llama"), numbers, prefix_cache=False))
    expected = run(cold, [one(77)])["one"]
    warm, warm_rows = recorded_over(parts_of(tiny("llama"), numbers, max_num_batched_tokens=64))
    # The prefix occurs in a shorter prompt, in a longer prompt with another end, and in an answer.
    run(warm, [group("short", prompt_of(LENGTH)[:41], max_tokens=30), *strangers()])
    run(warm, [group("long", prompt_of(LENGTH)[:60] + prompt_of(90, 4), n=2, max_tokens=3)])
    outcome = run(warm, [one(77)])["one"]
    assert outcome.prompt is not None and outcome.prompt.cached_tokens == 56
    assert outcome.tokens == expected.tokens
    assert_same_rows(warm_rows.rows, cold_rows.rows, [77])


def test_another_salt_finds_nothing(tiny: Tiny) -> None:
    core = make_core(tiny("llama"))

    def cached(salt: str) -> int:
        report = run(core, [group(f"salt {salt}", prompt_of(LENGTH), cache_salt=salt, max_tokens=1)])[
            f"salt {salt}"
        ].prompt
        assert report is not None
        return report.cached_tokens

    assert [cached(""), cached("a"), cached(""), cached("a"), cached("b")] == [0, 0, 80, 80, 0]


@pytest.mark.slow
def test_answers_enter_the_prefix_cache_only_with_the_flag(tiny: Tiny) -> None:
    for cache_answers in (False, True):
        core = make_core(tiny("llama"), cache_answers=cache_answers)
        prompt = prompt_of(LENGTH)
        answer = run(core, [group("ask", prompt, max_tokens=30)])["ask"].tokens[0]
        request = group("again", [*prompt, *answer, 5, 6, 7], max_tokens=10, temperature=0.0)
        again: GroupOutcome = run(core, [request])["again"]
        fresh = run(make_core(tiny("llama")), [request])["again"]
        assert again.prompt is not None
        assert again.prompt.cached_tokens == (112 if cache_answers else 80), (
            "112 of 83 + 30 tokens are in full, computed blocks"
        )
        assert again.tokens == fresh.tokens, "float32: the answer's KV is near enough for greedy decoding"
