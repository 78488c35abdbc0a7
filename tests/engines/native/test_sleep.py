"""An engine that sleeps releases its memory, and generates afterwards what it would have generated without the sleep.
An engine whose prefix cache is emptied finds nothing there, and its groups do not notice."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from motet.engine_info import FIRST_VERSION
from motet.engines.native.build import Parts
from motet.engines.native.core import EngineCore
from motet.engines.native.cpu.memory import release_pages
from motet.engines.native.sleep import Sleeper
from motet.errors import EngineError, RequestError
from motet.kv_events.changes import Cleared
from motet.models.checkpoint import CheckpointKind
from motet.transfer.orders import FailureKind
from tests.engines.native.conftest import MakePair
from tests.engines.native.drive import GroupOutcome, group, make_core, prompt_of, run, take_step
from tests.engines.native.pair import CorePair, with_ticket
from tests.engines.native.test_weights import FILE, NUMBERS, answer, built, core_of, drive, renew, saved
from tests.tiny_models import save_tiny_model

PROMPT, N, STEPS = prompt_of(83, 1), 5, 12


def sleeper_of(core: EngineCore, parts: Parts) -> Sleeper:
    return Sleeper(core, storage=parts.storage, weights=parts.weights)


def generating_and_waiting(core: EngineCore) -> dict[str, GroupOutcome]:
    """Lets one group generate some tokens while another group of the same prompt waits."""
    outcomes = {name: GroupOutcome() for name in ("generating", "waiting")}
    core.submit(group("generating", PROMPT, n=N, seed=50, max_tokens=40, logprobs=1))
    for _ in range(STEPS):
        take_step(core, outcomes)
    core.submit(group("waiting", PROMPT, n=2, seed=70))
    return outcomes


def undisturbed(parts: Parts) -> dict[str, GroupOutcome]:
    core = core_of(parts)
    return drive(core, generating_and_waiting(core))


def same(outcomes: dict[str, GroupOutcome], expected: dict[str, GroupOutcome]) -> bool:
    return all(
        (outcome.tokens, outcome.logprobs) == (expected[name].tokens, expected[name].logprobs)
        for name, outcome in outcomes.items()
    )


def wake_completely(core: EngineCore, parts: Parts, sleeper: Sleeper) -> None:
    """Wakes an engine that has released all its memory."""
    first = parts.weights.prepare(CheckpointKind.START)
    core.update(parts.weights.applied(first, core.info, version=FIRST_VERSION), first.staged.apply)
    sleeper.wake()


@pytest.mark.slow
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("weights", [False, True], ids=["level 1", "level 2"])
def test_kept_groups_continue_after_the_sleep_as_if_nothing_had_happened(
    weights: bool, numbers: dict[str, Any], tiny: Callable[[str], Path]
) -> None:
    expected = undisturbed(built(tiny("llama"), numbers))
    parts = built(tiny("llama"), numbers)
    core = core_of(parts)
    before, outcomes, sleeper = core.info, generating_and_waiting(core), sleeper_of(core, parts)
    for _ in range(2):
        core.held = True
        sleeper.sleep(weights=weights)
        core.check()
        assert core.step().deltas == [] and core.stats().blocks_used == 0
        if weights:
            wake_completely(core, parts, sleeper)
        else:
            sleeper.wake()
        core.held = False
        take_step(core, outcomes)
    assert same(drive(core, outcomes), expected)
    assert core.info == before


@pytest.mark.slow
def test_the_memory_of_kv_and_weights_is_released(tiny: Callable[[str], Path]) -> None:
    """Released memory is full of zeros when it is next read."""
    parts = built(tiny("llama"), {"dtype": "float32", "kernels": "torch"})
    core = core_of(parts)
    run(core, [group("warm", PROMPT)])
    kv = parts.storage.keys
    middle = kv.flatten()[2048:-2048]
    assert middle.any()
    core.held = True
    sleeper_of(core, parts).sleep(weights=True)
    assert not middle.any()


def test_only_complete_pages_are_released_and_their_neighbours_stay() -> None:
    page = 4096
    memory = torch.ones(8 * page, dtype=torch.uint8)
    begin = -memory.data_ptr() % page
    release_pages(memory[begin + 10 : begin + 3 * page + 10])
    zeros = (memory == 0).nonzero().flatten().tolist()
    assert zeros == list(range(begin + page, begin + 3 * page))
    release_pages(memory[begin + 4 * page + 1 : begin + 5 * page - 1])
    assert memory[begin + 3 * page :].all()


@pytest.mark.slow
def test_a_trainers_weights_take_the_place_of_sleeping_weights(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    other = save_tiny_model("llama", tmp_path / "other", seed=4)
    parts = built(tiny("llama"), {"dtype": "float32"})
    core = core_of(parts)
    core.held = True
    sleeper_of(core, parts).sleep(weights=True)
    renew(core, parts, other)
    core.held = False
    assert answer(core) == answer(core_of(built(other, {"dtype": "float32"})))


@pytest.mark.slow
def test_some_tensors_alone_do_not_wake_weights(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    norm = "model.norm.weight"
    part = saved(tmp_path / "part", {norm: load_file(tiny("llama") / FILE)[norm] * 2})
    parts = built(tiny("llama"), {"dtype": "float32"})
    core = core_of(parts)
    core.held, sleeper = True, sleeper_of(core, parts)
    sleeper.sleep(weights=True)
    with pytest.raises(RequestError, match=r"the old weights are released: POST /wake_up\?tags=weights") as refused:
        parts.weights.prepare(CheckpointKind.FILES, [part])
    assert refused.value.code == "invalid_weights"
    wake_completely(core, parts, sleeper)
    assert parts.weights.prepare(CheckpointKind.FILES, [part]).prepared.tensors == 1


@pytest.mark.slow
def test_weights_of_the_start_that_have_changed_are_not_taken(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "model")
    parts = built(folder, {"dtype": "float32"})
    core = core_of(parts)
    core.held = True
    sleeper_of(core, parts).sleep(weights=True)
    save_tiny_model("llama", folder, seed=4)
    with pytest.raises(EngineError, match="does not contain the weights of the start any more"):
        parts.weights.prepare(CheckpointKind.START)
    (folder / FILE).unlink()
    with pytest.raises(EngineError, match="the weights of the start cannot be read again"):
        parts.weights.prepare(CheckpointKind.START)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_an_emptied_prefix_cache_finds_nothing_and_running_groups_do_not_notice(
    recompute: bool, tiny: Callable[[str], Path]
) -> None:
    expected = undisturbed(built(tiny("llama"), {"dtype": "float32"}))
    core = core_of(built(tiny("llama"), {"dtype": "float32"}))
    outcomes = generating_and_waiting(core)
    core.forget_prefixes(recompute=recompute)
    assert same(drive(core, outcomes), expected)
    assert (core.stats().replayed_tokens > 0) == recompute


@pytest.mark.slow
def test_what_was_cached_before_is_computed_again(tiny: Callable[[str], Path]) -> None:
    core = make_core(tiny("llama"))
    first = run(core, [group("first", PROMPT, n=2)])["first"]
    hit = run(core, [group("hit", PROMPT, n=2)])["hit"]
    core.forget_prefixes(recompute=False)
    assert (core.stats().blocks_cached, core.step().blocks) == (0, [Cleared()])
    after = run(core, [group("after", PROMPT, n=2)])["after"]
    assert first.tokens == hit.tokens == after.tokens
    assert [one.prompt.cached_tokens for one in (first, hit, after) if one.prompt] == [0, 80, 0]


@pytest.mark.slow
def test_readers_of_an_engine_that_falls_asleep_find_their_leases_ended(make_pair: MakePair) -> None:
    pair: CorePair = make_pair()
    request = group("g", prompt_of(100), n=3, seed=5)
    ticket = pair.prefill(request)
    slot = pair.parts["P"].info.num_blocks + ticket.lease_slot
    assert shown(pair, slot) == ticket.digest
    pair.p.forget_kv()
    pair.p.check()
    assert (shown(pair, slot), pair.p.stats().leases, pair.p.stats().blocks_used) == (0, 0, 0)
    pair.submit(with_ticket(request, ticket))
    pair.step_d()
    [number] = pair.d_transfers.orders
    pair.d_transfers.fail(number, FailureKind.LEASE_ENDED)
    pair.finish()
    pair.check_same(request)


def shown(pair: CorePair, entry: int) -> int:
    """Returns what readers see in an entry of P's proof."""
    return ctypes.c_int64.from_address(pair.p_transfers.memory.proof + 8 * entry).value


@pytest.mark.slow
def test_a_group_whose_pull_is_open_computes_its_prompt_after_the_sleep(pair: CorePair) -> None:
    request = group("g", prompt_of(100), n=3, seed=5)
    pair.hand_over(request)
    pair.step_d()
    [number] = pair.d_transfers.orders
    pair.d.forget_kv()
    pair.d.check()
    assert number in pair.d_transfers.abandoned and pair.d.stats().blocks_pulling > 0
    pair.d_transfers.settle(number)
    pair.finish()
    pair.check_same(request)


@pytest.mark.slow
def test_memory_stays_while_a_worker_that_hangs_could_write_into_it(pair: CorePair) -> None:
    request = group("g", prompt_of(100), n=3, seed=5)
    pair.hand_over(request)
    pair.step_d()
    [number] = pair.d_transfers.orders
    parts = pair.parts["D"]
    sleeper, kv = sleeper_of(pair.d, parts), parts.storage.keys.flatten()
    kv.fill_(1.0)
    pair.d.held = True
    sleeper.sleep(weights=False)
    assert (pair.d_transfers.registered, bool(kv.all())) == (True, True)
    pair.d_transfers.settle(number)
    pair.step_d()
    sleeper.sleep(weights=False)
    assert (pair.d_transfers.registered, bool(kv[2048:-2048].any())) == (False, False)
    sleeper.wake()
    parts.storage.keys.zero_()
    pair.d.held = False
    assert pair.d_transfers.registered
    pair.finish()
    pair.check_same(request)
