"""Every field of `SamplingParams` changes the answers of the native engine: none is accepted and then ignored.

A new field fails here until the engine reads it. `CHANGES` then needs a value of it that changes an answer.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from motet.engines.native.core import EngineCore
from motet.engines.native.sample.compiled_sampling import CompiledSampling
from motet.engines.native.sample.filters import TorchFilters
from motet.engines.native.sample.sampler import Sampler
from motet.types import VERBATIM_FIELDS, Grammar, GrammarKind, LogprobsMode, SamplingParams
from tests.engines.native.drive import GroupOutcome, group, make_core, prompt_of, run
from tests.engines.native.sample.reference import Past
from tests.kernels import KERNEL_KINDS, kernels_of

# Field -> the other fields of two requests, and its value in the second one. The first one has the default.
CHANGES: Mapping[str, tuple[Mapping[str, object], object]] = {
    "max_tokens": ({}, 5),
    "temperature": ({}, 0.1),
    "top_p": ({}, 0.2),
    "top_k": ({}, 2),
    "min_p": ({}, 0.9),
    "presence_penalty": ({}, 2.0),
    "frequency_penalty": ({}, 2.0),
    "repetition_penalty": ({}, 2.0),
    "logit_bias": ({}, {40: 100.0}),
    "allowed_token_ids": ({}, (40, 41)),
    "bad_word_ids": ({"logit_bias": {40: 100.0}}, ((40,),)),
    "min_tokens": ({"stop_token_ids": tuple(range(3, 60))}, 10),
    "ignore_eos": ({"logit_bias": {1: 100.0, 2: 100.0}}, True),
    "stop_token_ids": ({}, tuple(range(3, 60))),
    "logprobs": ({}, 2),
    "logprob_token_ids": ({"logprobs": 0}, (40,)),
    "logprobs_mode": ({"logprobs": 2, "temperature": 0.5}, LogprobsMode.PROCESSED),
    "prompt_logprobs": ({}, 1),
    "prompt_logprob_token_ids": ({"prompt_logprobs": 0}, (40,)),
    "grammar": ({}, Grammar(GrammarKind.REGEX, "[0-9]{30}")),
}
FOR_OTHER_ENGINES = {"bad_words", "extra_args"}
"""Fields for workers of other kinds: the texts of `bad_word_ids`, and arguments that this engine's client refuses."""
SAMPLER_FIELDS = [name for name in VERBATIM_FIELDS if name != "ignore_eos"]
"""Fields that only the sampler reads; `ignore_eos` is read by the scheduler."""

VOCAB = 1000
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def core(model: Path) -> EngineCore:
    return make_core(model)


def change_of(name: str) -> tuple[Mapping[str, object], object]:
    assert name in CHANGES, f"give a value of {name} that changes an answer of the native engine"
    return CHANGES[name]


def outcome(core: EngineCore, fields: Mapping[str, object]) -> GroupOutcome:
    fields = {"ignore_eos": False, **fields}
    return run(core, [group("g", prompt_of(20), n=4, seed=3, **fields)])["g"]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in SamplingParams.__struct_fields__ if name not in FOR_OTHER_ENGINES])
def test_the_engine_reads_every_sampling_field(core: EngineCore, name: str) -> None:
    others, value = change_of(name)
    assert outcome(core, {**others, name: value}) != outcome(core, others)


@pytest.fixture(params=["torch", *KERNEL_KINDS])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    kind = str(request.param)
    return Sampler(
        VOCAB, CPU, filters=TorchFilters(VOCAB) if kind == "torch" else CompiledSampling(VOCAB, kernels_of(kind))
    )


@pytest.mark.parametrize("name", SAMPLER_FIELDS)
def test_each_implementation_of_the_sampler_reads_every_field(sampler: Sampler, name: str) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    others, value = change_of(name)

    def sampled(fields: Mapping[str, object]) -> list[int]:
        params = SamplingParams(max_tokens=9, **fields)  # type: ignore[arg-type]
        rows = [Past(seed, output_tokens=(5, 5, 7)).sample_row(0, params) for seed in range(200)]
        return [token.token_id for token in sampler.sample(logits, rows)]

    assert sampled({**others, name: value}) != sampled(others)
