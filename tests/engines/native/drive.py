"""Drives an engine core in a test: builds it, submits groups, takes steps, and checks invariants after each step."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from motet.engines.native.build import build_parts, core_over
from motet.engines.native.core import EngineCore
from motet.errors import MotetError
from motet.ids import RequestId
from motet.settings.engine_config import EngineConfig
from motet.types import (
    ChoiceStart,
    Finish,
    GenerateRequest,
    PromptReport,
    SamplingParams,
    TokenLogprob,
    choice_starts,
)
from tests.tiny_engine import BLOCK_SIZE, engine_config
from tests.tiny_models import KV_NUMBERS_PER_TOKEN, VOCAB_SIZE


def build_core(config: EngineConfig) -> EngineCore:
    return core_over(build_parts(config), config)


def make_core(
    folder: Path, *, blocks: int = 512, budget: int = 512, dtype: str = "float32", **changes: object
) -> EngineCore:
    """Builds a core over a tiny model with exactly `blocks` blocks of 8 tokens and `budget` tokens for each step."""
    kv_cache_gb = gb_of(blocks, 4 if dtype == "float32" else 2)
    return build_core(
        engine_config(folder, dtype=dtype, kv_cache_gb=kv_cache_gb, max_num_batched_tokens=budget, **changes)
    )


def gb_of(blocks: int, itemsize: int = 4) -> float:
    """Returns the size in GB of `blocks` blocks of a tiny model's KV, with `itemsize` bytes for each number."""
    return blocks * BLOCK_SIZE * KV_NUMBERS_PER_TOKEN * itemsize / 2**30


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Returns random tokens without special tokens."""
    rng = random.Random(seed)
    return tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length))


def group(
    name: str,
    prompt: Sequence[int],
    *,
    n: int = 1,
    seed: int = 0,
    starts: Sequence[ChoiceStart] | None = None,
    cache_salt: str = "",
    **sampling: object,
) -> GenerateRequest:
    """Returns a request for 20 tokens for each choice that ignores end-of-sequence, unless `sampling` changes that."""
    fields: dict[str, object] = {"ignore_eos": True, "max_tokens": 20, **sampling}
    return GenerateRequest(
        request_id=RequestId(name),
        prompt=tuple(prompt),
        choices=tuple(starts) if starts is not None else choice_starts(n, seed),
        sampling=SamplingParams(**fields),  # type: ignore[arg-type]
        cache_salt=cache_salt,
    )


@dataclass
class GroupOutcome:
    """All results of a group."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    finish: dict[int, Finish] = field(default_factory=dict)
    prompt: PromptReport | None = None
    error: MotetError | None = None


def run(core: EngineCore, requests: Iterable[GenerateRequest], *, stagger: int = 0) -> dict[str, GroupOutcome]:
    """Runs groups to their end, and checks that no block is held then. A new group starts every `stagger` steps, or all
    groups at once if it is 0."""
    waiting = list(requests)
    outcomes = {str(request.request_id): GroupOutcome() for request in waiting}
    step = 0
    while waiting or core.busy:
        while waiting and (stagger == 0 or step % stagger == 0):
            core.submit(waiting.pop(0))
            if stagger:
                break
        take_step(core, outcomes)
        step += 1
        assert step < 20_000, "the groups do not end"
    assert core.stats().blocks_used == 0
    return outcomes


def take_step(core: EngineCore, outcomes: dict[str, GroupOutcome]) -> None:
    """Takes one step, and adds its deltas to the outcomes."""
    result = core.step()
    core.check()
    for delta in result.deltas:
        outcome = outcomes[delta.request_id]
        assert (delta.prompt is not None) == (outcome.prompt is None), "only the first delta has a prompt report"
        outcome.prompt = outcome.prompt or delta.prompt
        for choice in delta.choices:
            assert choice.index not in outcome.finish, f"choice {choice.index} continued after its end"
            outcome.tokens.setdefault(choice.index, []).extend(choice.token_ids)
            outcome.logprobs.setdefault(choice.index, []).extend(choice.logprobs or ())
            if choice.finish:
                outcome.finish[choice.index] = choice.finish
    for request_id, error in result.failures.items():
        outcomes[request_id].error = error
