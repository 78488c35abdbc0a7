"""The core as its process uses it: refusals, aborts and stops, logits that are not finite, counters."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from motet.engines.native.build import build_parts
from motet.engines.native.core import EngineCore
from motet.engines.native.step.inputs import StepInputs
from motet.engines.native.step.run import ModelRunner
from motet.errors import ConfigError, ContextLengthError, EngineError, KVMemoryError, RequestError
from motet.ids import RequestId
from motet.types import ChoiceStart, FinishReason
from tests.engines.native.drive import GroupOutcome, group, make_core, prompt_of, run, take_step
from tests.engines.native.recorder import WrappedRunner
from tests.tiny_engine import engine_config
from tests.tiny_models import Reference

Tiny = Callable[[str], Path]


def test_a_group_that_can_never_run_is_refused_with_the_reason(tiny: Tiny) -> None:
    core = make_core(tiny("llama"), blocks=40, max_model_len=300, max_num_seqs=32)
    with pytest.raises(ContextLengthError, match="at most 299"):
        core.submit(group("long", prompt_of(300)))
    with pytest.raises(ContextLengthError):
        core.submit(group("empty", ()))
    with pytest.raises(RequestError, match="at most 32 choices") as too_many:
        core.submit(group("many", prompt_of(5), n=33))
    assert too_many.value.param == "n"
    with pytest.raises(RequestError, match="need 46 KV blocks at once; this engine has 40"):
        core.submit(group("wide", prompt_of(128), n=30))
    core.submit(group("twice", prompt_of(5)))
    with pytest.raises(RequestError, match="in use"):
        core.submit(group("twice", prompt_of(5)))
    assert core.stats().groups_waiting == 1


def test_a_choice_that_has_its_max_tokens_already_is_refused(tiny: Tiny) -> None:
    core = make_core(tiny("llama"))
    with pytest.raises(RequestError, match="it cannot be resumed"):
        core.submit(group("done", prompt_of(5), starts=[ChoiceStart(0, 1, (7, 8, 9))], max_tokens=3))
    assert not core.busy


def test_the_error_for_a_cache_too_small_for_one_sequence_says_what_would_fit(tiny: Tiny) -> None:
    with pytest.raises(KVMemoryError, match=r"needs 65 .* --max-model-len to 312 or less"):
        make_core(tiny("llama"), blocks=40, max_model_len=512)
    assert make_core(tiny("llama"), blocks=40, max_model_len=312).info.num_blocks == 40


def test_impossible_settings_name_their_flag(tiny: Tiny) -> None:
    for changes, flag in (
        ({"max_model_len": 5000}, "--max-model-len"),
        ({"device": "tpu"}, "--device"),
        ({"device": "cuda:7"}, "--device"),
        ({"dtype": "int3"}, "--dtype"),
    ):
        with pytest.raises(ConfigError, match=flag):
            build_parts(engine_config(tiny("llama"), **changes))


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(0, id="queued", marks=pytest.mark.slow),
        pytest.param(1, id="prefilling"),
        pytest.param(3, id="first tokens", marks=pytest.mark.slow),
        pytest.param(12, id="decoding"),
    ],
)
def test_an_aborted_group_ends_at_once_and_leaves_other_groups_unchanged(steps: int, device: str, tiny: Tiny) -> None:
    expected = run(make_core(tiny("llama"), device=device), [group("b", prompt_of(30, 2), n=3, seed=9)])["b"].tokens
    core = make_core(tiny("llama"), device=device, budget=64)
    outcomes = {"a": GroupOutcome(), "b": GroupOutcome()}
    core.submit(group("a", prompt_of(100), n=4))
    core.submit(group("b", prompt_of(30, 2), n=3, seed=9))
    for _ in range(steps):
        take_step(core, outcomes)
    core.abort(RequestId("a"))
    core.check()
    core.abort(RequestId("a"))
    before = len(outcomes["a"].tokens)
    while core.busy:
        take_step(core, outcomes)
    assert len(outcomes["a"].tokens) == before, "no tokens arrive after an abort"
    assert outcomes["b"].tokens == expected
    assert core.stats().blocks_used == 0


def test_a_stopped_choice_ends_alone_and_the_last_one_ends_the_group(device: str, tiny: Tiny) -> None:
    core = make_core(tiny("llama"), device=device)
    outcomes = {"g": GroupOutcome()}
    core.submit(group("g", prompt_of(20), n=3, max_tokens=10))
    take_step(core, outcomes)
    core.stop_choice(RequestId("g"), 1)
    core.check()
    take_step(core, outcomes)
    assert [len(outcomes["g"].tokens[i]) for i in range(3)] == [2, 1, 2]
    core.stop_choice(RequestId("g"), 0)
    core.stop_choice(RequestId("g"), 2)
    core.stop_choice(RequestId("g"), 2)
    core.stop_choice(RequestId("unknown"), 0)
    core.check()
    assert not core.busy and core.stats().blocks_used == 0


def test_one_choice_of_a_waiting_group_can_be_stopped(tiny: Tiny) -> None:
    core = make_core(tiny("llama"))
    core.submit(group("g", prompt_of(20), n=2, max_tokens=3))
    core.stop_choice(RequestId("g"), 0)
    core.check()
    outcomes = {"g": GroupOutcome()}
    while core.busy:
        take_step(core, outcomes)
    assert list(outcomes["g"].tokens) == [1]


def test_a_stopped_choice_of_a_greedy_group_leaves_its_siblings(device: str, tiny: Tiny) -> None:
    core = make_core(tiny("llama"), device=device)
    outcomes = {"g": GroupOutcome()}
    core.submit(group("g", prompt_of(20), n=3, max_tokens=5, temperature=0.0))
    take_step(core, outcomes)
    core.stop_choice(RequestId("g"), 0)
    while core.busy:
        take_step(core, outcomes)
    assert [len(outcomes["g"].tokens[i]) for i in range(3)] == [1, 5, 5]
    assert outcomes["g"].tokens[1] == outcomes["g"].tokens[2]


class NonFiniteRunner(WrappedRunner):
    """A runner that puts a NaN into the logits of one group at its third token, as overflowing weights would."""

    def __init__(self, runner: ModelRunner, victim: str) -> None:
        super().__init__(runner)
        self._victim = victim

    def run(self, inputs: StepInputs) -> torch.Tensor:
        logits = super().run(inputs).clone()
        for token in inputs.next_tokens:
            if token.sequence.group.request.request_id == self._victim and len(token.sequence.output_tokens) == 2:
                logits[token.row, 7] = float("nan")
        return logits


def test_logits_that_are_not_finite_fail_their_group_alone(device: str, tiny: Tiny) -> None:
    expected = run(make_core(tiny("llama"), device=device), [group("well", prompt_of(30, 2), n=2, seed=9)])[
        "well"
    ].tokens
    parts = build_parts(engine_config(tiny("llama"), device=device))
    core = EngineCore(parts.info, NonFiniteRunner(parts.runner, "broken"), options=parts.options)
    outcomes = run(core, [group("broken", prompt_of(25), n=3), group("well", prompt_of(30, 2), n=2, seed=9)])
    assert isinstance(outcomes["broken"].error, EngineError)
    assert [len(tokens) for tokens in outcomes["broken"].tokens.values()] == [2, 2, 2]
    assert outcomes["well"].tokens == expected


@pytest.mark.slow
def test_preempted_choices_count_as_waiting(device: str, tiny: Tiny) -> None:
    core = make_core(tiny("llama"), device=device, blocks=40, max_model_len=256)
    core.submit(group("g", prompt_of(64), n=12, max_tokens=40))
    outcomes, counts = {"g": GroupOutcome()}, set[tuple[int, int]]()
    while core.busy:
        take_step(core, outcomes)
        stats = core.stats()
        assert stats.choices_running + stats.choices_waiting == 12 - len(outcomes["g"].finish)
        counts.add((stats.choices_running, stats.choices_waiting))
    assert (12, 0) in counts and any(waiting for _, waiting in counts)


def test_choices_end_at_end_of_sequence_stop_token_max_tokens_and_model_length(device: str, tiny: Tiny) -> None:
    core = make_core(tiny("llama"), device=device, max_model_len=40)
    answer = run(core, [group("free", prompt_of(20), max_tokens=15, temperature=0.0)])["free"].tokens[0]
    stop = next(token for i, token in enumerate(answer) if i >= 3 and token not in answer[:i])
    ends = run(
        core,
        [
            group("stop", prompt_of(20), max_tokens=15, temperature=0.0, stop_token_ids=(stop,)),
            group("eos", prompt_of(20), max_tokens=15, seed=3, logit_bias={2: 100.0}, ignore_eos=False),
            group("late", prompt_of(20), max_tokens=15, logit_bias={2: 100.0}, ignore_eos=False, min_tokens=4),
            group("length", prompt_of(20), max_tokens=15),
            group("model", prompt_of(20), max_tokens=100),
        ],
    )
    assert ends["stop"].tokens[0] == answer[: answer.index(stop) + 1]
    assert (ends["stop"].finish[0].reason, ends["stop"].finish[0].stop_token_id) == (FinishReason.STOP, stop)
    assert ends["eos"].tokens[0] == [2] and ends["eos"].finish[0].reason is FinishReason.STOP
    assert len(ends["late"].tokens[0]) == 5 and ends["late"].tokens[0][-1] == 2
    assert (len(ends["length"].tokens[0]), ends["length"].finish[0].reason) == (15, FinishReason.LENGTH)
    assert (len(ends["model"].tokens[0]), ends["model"].finish[0].reason) == (20, FinishReason.LENGTH)


def test_prompt_logprobs_equal_the_references_and_do_not_depend_on_chunks(
    device: str, tiny: Tiny, reference: Callable[[str], Reference]
) -> None:
    prompt = prompt_of(70)
    expected = torch.log_softmax(reference("llama").logits(prompt), dim=-1)
    for budget in (512, 64):
        core = make_core(tiny("llama"), device=device, budget=budget)
        run(core, [group("warm", prompt, max_tokens=1)])
        report = run(core, [group("g", prompt, n=2, max_tokens=2, prompt_logprobs=2)])["g"].prompt
        assert report is not None and report.logprobs is not None
        assert report.cached_tokens == 0, "cached tokens would have no logits"
        assert len(report.logprobs) == 70 and report.logprobs[0] is None
        for position, found in enumerate(report.logprobs[1:], start=1):
            assert found is not None and found.token_id == prompt[position]
            assert found.logprob == pytest.approx(float(expected[position - 1, prompt[position]]), abs=1e-4)
            assert len(found.top) == 2


def test_forks_share_the_complete_trunk_and_the_trunk_is_read_once_a_step(device: str, tiny: Tiny) -> None:
    core = make_core(tiny("llama"), device=device)
    run(core, [group("g", prompt_of(83), n=8, max_tokens=10)])
    counters = core.counters
    assert counters.prefill_tokens == 83, "one prefill"
    assert counters.forks == 7
    assert counters.blocks_shared == 7 * 11, "83 tokens need 11 blocks of 8"
    assert counters.bytes_saved == 7 * 11 * core.info.bytes_per_block
    assert counters.trunk_tokens_read == 83 * 9, "the first token comes from the prompt's own last row"
    assert counters.trunk_tokens_unshared == 8 * 83 * 9
