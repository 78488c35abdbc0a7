"""A prompt that is kept after its answers: more choices need no prefill, and equal the choices of a larger group."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from motet.engines.native.kv.pool import BlockPool
from motet.engines.native.scheduling.keeping import KeptTrunks
from motet.engines.native.scheduling.sharing import SharedTrunk, Sharing
from motet.engines.native.step.sequence import Group
from motet.errors import RequestError
from motet.ids import RequestId
from motet.metrics.stats import EngineStats
from motet.types import GenerateRequest
from tests.engines.native.drive import gb_of, group, make_core, prompt_of, run
from tests.engines.native.pair import CorePair

PROMPT = prompt_of(83, 1)
BLOCKS = 11
KERNELS = pytest.mark.kernels

Tiny = Callable[[str], Path]


def request(name: str, *, n: int = 2, seed: int = 0, keep_s: float = 0.0, **fields: Any) -> GenerateRequest:
    return replace(group(name, PROMPT, n=n, seed=seed, **{"max_tokens": 12, **fields}), keep_s=keep_s)


@pytest.mark.slow
@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param({"dtype": "bfloat16"}, marks=KERNELS, id="bfloat16"),
        pytest.param({"dtype": "float32", "kernels": "torch"}, id="torch"),
    ],
)
def test_more_choices_of_a_kept_prompt_need_no_prefill_and_equal_a_larger_group(
    numbers: dict[str, Any], tiny: Tiny
) -> None:
    core = make_core(tiny("llama"), **numbers)
    first = run(core, [request("first", n=2, keep_s=60)])["first"].tokens
    assert (core.stats().blocks_used, core.stats().blocks_kept) == (0, BLOCKS)
    run(core, [group("stranger", prompt_of(40, 5))])
    computed = core.stats().prefill_tokens
    more = run(core, [request("more", n=3, seed=2)])["more"]
    assert core.stats().prefill_tokens == computed + 1
    assert more.prompt is not None and more.prompt.cached_tokens == len(PROMPT) - 1
    undivided = run(make_core(tiny("llama"), prefix_cache=False, **numbers), [request("whole", n=5)])["whole"].tokens
    assert [*first.values(), *more.tokens.values()] == [*undivided.values()]
    core.forget_prefixes(recompute=False)
    assert (core.stats().blocks_used, core.stats().blocks_kept) == (0, 0)


@pytest.mark.slow
def test_a_kept_prompt_is_released_before_any_choice_is_preempted(tiny: Tiny) -> None:
    """Free and idle blocks are taken first, then the blocks of kept trunks. No choice is preempted."""
    core = make_core(tiny("llama"), blocks=24, max_model_len=120)
    run(core, [request("kept", n=1, keep_s=60)])
    run(core, [group("small", prompt_of(40, 5))])
    assert core.stats().blocks_kept == BLOCKS
    run(core, [group("large", prompt_of(90, 6), n=2, max_tokens=30)])
    assert core.stats().blocks_kept == 0
    assert core.stats().preemptions == 0


@pytest.mark.slow
def test_a_prompt_that_was_prefilled_elsewhere_is_kept_where_it_is_decoded(tiny: Tiny) -> None:
    """The next group needs no ticket. A group that has a ticket releases it, and fetches nothing."""
    pair = CorePair(tiny("llama"))
    first, plain, apart = request("first", keep_s=60), request("plain", seed=2), request("apart", seed=4)
    pair.hand_over(first)
    pair.finish()
    pair.submit(plain)
    pair.finish()
    ticket = pair.hand_over(apart)
    pair.finish()
    stats = pair.d.stats()
    assert (stats.prefill_tokens, stats.transfers, stats.trunks_kept, stats.blocks_kept) == (3, 1, 1, BLOCKS)
    assert pair.p.stats().trunks_kept == 0
    assert ticket in pair.d_transfers.released
    pair.check_same(first, plain, apart)
    pair.check_empty()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["new weights", "abort"])
def test_a_prompt_is_kept_under_its_own_weights_and_after_answers_only(end: str, tiny: Tiny) -> None:
    core = make_core(tiny("llama"))
    if end == "abort":
        core.submit(request("cut", keep_s=60))
        core.step()
        core.abort(request("cut").request_id)
    else:
        run(core, [request("whole", keep_s=60)])
        core.update(replace(core.info, block_weights="new"), lambda: None)
    assert (core.stats().blocks_used, core.stats().blocks_kept) == (0, 0)


def test_a_prompt_that_cannot_be_kept_is_refused_by_name(tiny: Tiny) -> None:
    core = make_core(tiny("llama"), prefix_cache=False)
    with pytest.raises(RequestError, match="'keep_s'") as refused:
        core.submit(request("g", keep_s=1))
    assert refused.value.param == "keep_s"


@dataclass(frozen=True)
class KeptFigures:
    trunks: int
    blocks: int
    given_up: int


@pytest.mark.slow
def test_over_the_limit_the_least_recently_used_prompt_is_released(tiny: Tiny) -> None:
    """Each prompt has 11 blocks, and the first two prompts share their first 5 blocks."""
    core = make_core(tiny("llama"), keep_gb=gb_of(22))

    def figures() -> KeptFigures:
        stats = core.stats()
        return KeptFigures(stats.trunks_kept, stats.blocks_kept, stats.trunks_given_up)

    def computed(prompt: tuple[int, ...], *, keep_s: float = 0.0) -> int:
        before = core.stats().prefill_tokens
        run(core, [replace(group("g", prompt), keep_s=keep_s)])
        return core.stats().prefill_tokens - before

    alike, other = (*PROMPT[:40], *prompt_of(43, 2)), prompt_of(83, 3)
    assert [computed(prompt, keep_s=60) for prompt in (PROMPT, alike)] == [83, 43]
    assert figures() == KeptFigures(trunks=2, blocks=17, given_up=0)
    assert computed(PROMPT) == 1
    assert computed(other, keep_s=60) == 83
    assert figures() == KeptFigures(trunks=2, blocks=22, given_up=1)
    assert computed(prompt_of(180, 4), keep_s=60) == 180
    assert figures() == KeptFigures(trunks=2, blocks=22, given_up=2), "23 blocks are more than may be kept"
    assert [computed(prompt) for prompt in (PROMPT, other)] == [1, 1]
    assert computed(alike) == 3, "the tokens after the last full block"


@pytest.mark.slow
def test_with_a_limit_of_zero_no_prompt_is_kept(tiny: Tiny) -> None:
    core = make_core(tiny("llama"), keep_gb=0.0)
    run(core, [request("first", keep_s=60)])
    assert (core.stats().trunks_kept, core.stats().blocks_kept, core.stats().trunks_given_up) == (0, 0, 1)


class Scene:
    """Three running groups, each with a computed trunk of two blocks in a pool of eight, and a clock."""

    def __init__(self, max_blocks: int | None = None) -> None:
        self.now_s = 0.0
        self.pool = BlockPool(8)
        self.sharing, self.counters = Sharing(), EngineStats()
        self.kept = KeptTrunks(
            self.pool, self.sharing, counters=self.counters, clock=lambda: self.now_s, max_blocks=max_blocks
        )
        self.groups = [self._group(str(number)) for number in range(3)]
        self.trunks = [self._trunk(one) for one in self.groups]

    def _group(self, name: str) -> Group:
        one = Group(group(name, (1,)), 0, names=[])
        one.trunk.key, one.trunk.blocks, one.trunk.num_computed = (name.encode(), ()), self.pool.take(2), 1
        return one

    def _trunk(self, first: Group) -> SharedTrunk:
        self.sharing.entered(first, block_size=1)
        self.sharing.advanced(first, 0)
        trunk = self.sharing.trunk_of(first)
        assert trunk is not None and trunk.complete
        return trunk

    def keep(self, number: int, seconds: float) -> None:
        self.kept.keep(self.trunks[number], seconds)
        self.kept.check()

    def leave(self, number: int) -> None:
        """Lets a group leave its trunk."""
        one = self.groups[number]
        self.sharing.left(one)
        self.kept.used_by(one)
        self.pool.release(one.trunk.blocks)

    def come_back(self, number: int) -> None:
        """Lets a group join a kept trunk."""
        one = self.groups[number]
        one.trunk.joined = True
        self.pool.share(one.trunk.blocks)
        self.sharing.entered(one, block_size=1)

    def left(self) -> None:
        """Lets all groups leave."""
        for number in range(3):
            self.leave(number)

    def is_kept(self) -> list[bool]:
        assert self.kept.num_blocks == 2 * sum(trunk.kept and not trunk.groups for trunk in self.trunks)
        assert len(self.kept) == sum(trunk.kept for trunk in self.trunks)
        self.kept.check()
        return [trunk.kept for trunk in self.trunks]


def test_each_kept_trunk_ends_at_the_latest_time_that_was_requested() -> None:
    scene = Scene()
    for number, seconds in enumerate((5, 3, 4)):
        scene.keep(number, seconds)
    scene.keep(1, 9)
    scene.keep(0, 1)
    scene.left()
    scene.now_s = 3.5
    scene.kept.release_expired()
    assert scene.is_kept() == [True, True, True]
    scene.now_s = 5.0
    scene.kept.release_expired()
    assert scene.is_kept() == [False, True, False]
    assert scene.kept.next_expiry_s == 9
    scene.now_s = 9.0
    scene.kept.release_expired()
    assert scene.is_kept() == [False, False, False]
    assert scene.counters.trunks_given_up == 0
    assert scene.kept.next_expiry_s is None


def test_the_least_recently_used_trunk_is_released_first_even_if_it_ends_last() -> None:
    scene = Scene()
    for number, seconds in enumerate((5, 9, 4)):
        scene.keep(number, seconds)
    scene.left()
    scene.come_back(0)
    scene.leave(0)
    assert scene.kept.ensure_free(2)
    assert scene.is_kept() == [True, True, True], "two blocks were free"
    assert scene.kept.ensure_free(3)
    assert scene.is_kept() == [True, False, True]
    assert not scene.kept.ensure_free(9)
    assert scene.is_kept() == [True, False, True], "no trunk is released if that would not be enough"
    assert scene.kept.ensure_free(8)
    assert scene.is_kept() == [False, False, False]
    assert scene.counters.trunks_given_up == 3


def test_a_trunk_that_groups_share_or_are_joining_is_not_released() -> None:
    scene = Scene()
    for number in range(3):
        scene.keep(number, 5)
    scene.left()
    scene.come_back(0)
    assert not scene.kept.ensure_free(6, exempt=scene.trunks[1])
    assert scene.kept.ensure_free(4, exempt=scene.trunks[1])
    assert scene.is_kept() == [True, True, False]


def test_over_the_limit_the_least_recently_used_trunk_goes_and_trunks_in_use_go_last() -> None:
    scene = Scene(max_blocks=5)
    for number in (0, 1):
        scene.keep(number, 5)
        scene.leave(number)
    scene.come_back(0)
    scene.keep(2, 1)
    assert scene.is_kept() == [True, False, True], "0 is in use, so 1 is released, although it was used later"
    scene.leave(0)
    scene.leave(2)
    scene.come_back(0)
    assert scene.counters.trunks_given_up == 1


def test_if_all_other_trunks_are_in_use_one_is_evicted_and_stays_shared() -> None:
    scene = Scene(max_blocks=3)
    scene.keep(0, 5)
    scene.keep(1, 5)
    assert scene.is_kept() == [False, True, False]
    assert scene.sharing.trunk_of(scene.groups[0]) is scene.trunks[0]
    scene.left()
    assert scene.is_kept() == [False, True, False]
    assert scene.sharing.trunk_of(scene.groups[0]) is None
    assert scene.pool.num_held == 2


def test_a_trunk_larger_than_the_limit_is_not_kept_and_releases_no_other() -> None:
    scene = Scene(max_blocks=2)
    scene.keep(0, 5)
    scene.leave(0)
    scene.trunks[1].blocks = [*scene.trunks[1].blocks, *scene.pool.take(1)]
    scene.keep(1, 5)
    assert scene.is_kept() == [True, False, False]
    assert scene.counters.trunks_given_up == 1


def test_a_block_of_several_kept_trunks_counts_once() -> None:
    scene = Scene(max_blocks=3)
    first, other = scene.trunks[0].blocks, scene.groups[1]
    scene.pool.release(other.trunk.blocks[:1])
    other.trunk.blocks[0] = first[0]
    scene.pool.share(first[:1])
    for number in (0, 1):
        scene.keep(number, 5 - number)
        scene.leave(number)
    assert (len(scene.kept), scene.kept.num_blocks) == (2, 3)
    scene.now_s = 4.0
    scene.kept.release_expired()
    assert (len(scene.kept), scene.kept.num_blocks) == (1, 2)
    scene.kept.check()


@pytest.mark.slow
def test_the_client_that_keeps_the_most_loses_its_kept_prompts_first(tiny: Tiny) -> None:
    core = make_core(tiny("llama"), blocks=60, max_model_len=120, keep_gb=gb_of(32))
    kept = [
        replace(group(name, prompt_of(60, seed)), keep_s=60, client=name[:3], cache_salt=name[:3])  # 8 blocks each
        for seed, name in enumerate(["one", "two1", "two2", "two3", "two4"])
    ]
    for one in kept:
        run(core, [one])
    again = [replace(one, request_id=RequestId(f"{one.request_id} again"), keep_s=0.0) for one in kept]
    reports = [run(core, [one])[str(one.request_id)].prompt for one in again[:2]]
    assert [report is not None and report.cached_tokens for report in reports] == [59, 56]  # joined; only full blocks
    assert (core.stats().trunks_kept, core.stats().trunks_given_up) == (4, 1)
