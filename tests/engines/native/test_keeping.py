"""A prompt that is kept after its answers: more choices of it cost no prefill, and are those of a larger group."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from motet.engines.native.kv.pool import BlockPool
from motet.engines.native.step.keeping import KeptTrunks
from motet.engines.native.step.sequence import Group
from motet.engines.native.step.sharing import SharedTrunk, Sharing
from motet.errors import RequestError
from motet.types import GenerateRequest
from tests.engines.native.drive import group, make_core, prompt_of, run

PROMPT = prompt_of(83, 1)
BLOCKS = 11
KERNELS = pytest.mark.kernels

Tiny = Callable[[str], Path]


def asked(name: str, *, n: int = 2, seed: int = 0, keep_s: float = 0.0, **fields: Any) -> GenerateRequest:
    return replace(group(name, PROMPT, n=n, seed=seed, **{"max_tokens": 12, **fields}), keep_s=keep_s)


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param({"dtype": "bfloat16"}, marks=KERNELS, id="bfloat16"),
        pytest.param({"dtype": "float32", "kernels": "torch"}, id="torch"),
    ],
)
def test_more_choices_of_a_kept_prompt_cost_no_prefill_and_are_those_of_a_larger_group(
    numbers: dict[str, Any], tiny: Tiny
) -> None:
    core = make_core(tiny("llama"), **numbers)
    first = run(core, [asked("first", n=2, keep_s=60)])["first"].tokens
    assert (core.stats().blocks_used, core.stats().blocks_kept) == (0, BLOCKS)
    run(core, [group("stranger", prompt_of(40, 5))])
    computed = core.stats().prefill_tokens
    more = run(core, [asked("more", n=3, seed=2)])["more"]
    assert core.stats().prefill_tokens == computed + 1
    assert more.prompt is not None and more.prompt.cached_tokens == len(PROMPT) - 1
    whole = run(make_core(tiny("llama"), prefix_cache=False, **numbers), [asked("whole", n=5)])["whole"].tokens
    assert [*first.values(), *more.tokens.values()] == [*whole.values()]
    core.forget_prefixes(anew=False)
    assert (core.stats().blocks_used, core.stats().blocks_kept) == (0, 0)


def test_a_kept_prompt_is_given_up_before_any_choice_is_put_back(tiny: Tiny) -> None:
    """Free and idle blocks are taken first, then those that are kept, and nobody is preempted for them."""
    core = make_core(tiny("llama"), blocks=24, max_model_len=120)
    run(core, [asked("kept", n=1, keep_s=60)])
    run(core, [group("small", prompt_of(40, 5))])
    assert core.stats().blocks_kept == BLOCKS
    run(core, [group("large", prompt_of(90, 6), n=2, max_tokens=30)])
    assert core.stats().blocks_kept == 0
    assert core.stats().preemptions == 0


@pytest.mark.parametrize("end", ["new weights", "abort"])
def test_a_prompt_is_kept_under_its_own_weights_and_after_answers_only(end: str, tiny: Tiny) -> None:
    core = make_core(tiny("llama"))
    if end == "abort":
        core.submit(asked("cut", keep_s=60))
        core.step()
        core.abort(asked("cut").request_id)
    else:
        run(core, [asked("whole", keep_s=60)])
        core.update(replace(core.info, block_weights="new"), lambda: None)
    assert (core.stats().blocks_used, core.stats().blocks_kept) == (0, 0)


@pytest.mark.parametrize("changes", [{"prompt_logprobs": 1}, {}])
def test_a_prompt_that_cannot_be_kept_is_refused_by_name(changes: dict[str, int], tiny: Tiny) -> None:
    core = make_core(tiny("llama"), prefix_cache=bool(changes))
    with pytest.raises(RequestError, match="'keep_s'") as refused:
        core.submit(asked("g", keep_s=1, **changes))
    assert refused.value.param == "keep_s"


class Scene:
    """Three computed trunks of two blocks each, of groups that have ended, and a clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pool = BlockPool(8)
        self.kept = KeptTrunks(self.pool, Sharing(), clock=lambda: self.now_s)
        self.trunks = [self._trunk(str(number)) for number in range(3)]

    def _trunk(self, name: str) -> SharedTrunk:
        first = Group(group(name, (1,)), 0, [])
        return SharedTrunk((name, ()), first, ready=True, blocks=self.pool.take(2))

    def left(self) -> None:
        """Their groups are gone."""
        for trunk in self.trunks:
            self.pool.release(trunk.blocks)

    def is_kept(self) -> list[bool]:
        assert self.pool.num_held == self.kept.num_blocks == 2 * sum(trunk.kept for trunk in self.trunks)
        return [trunk.kept for trunk in self.trunks]


def test_each_ends_at_its_time_and_the_longest_wish_counts() -> None:
    scene = Scene()
    for trunk, seconds in zip(scene.trunks, (5, 3, 4), strict=True):
        scene.kept.keep(trunk, seconds)
    scene.kept.keep(scene.trunks[1], 9)
    scene.kept.keep(scene.trunks[0], 1)
    scene.left()
    scene.now_s = 3.5
    scene.kept.end_late()
    assert scene.is_kept() == [True, True, True]
    scene.now_s = 5.0
    scene.kept.end_late()
    assert scene.is_kept() == [False, True, False]
    assert scene.kept.next_end_s == 9
    scene.now_s = 9.0
    scene.kept.end_late()
    assert scene.is_kept() == [False, False, False]
    assert scene.kept.next_end_s is None


def test_the_one_whose_time_is_up_next_makes_room_first() -> None:
    scene = Scene()
    for trunk, seconds in zip(scene.trunks, (5, 3, 4), strict=True):
        scene.kept.keep(trunk, seconds)
    scene.left()
    assert scene.kept.make_room(2)
    assert scene.is_kept() == [True, True, True], "so many were free"
    assert scene.kept.make_room(3)
    assert scene.is_kept() == [True, False, True]
    assert not scene.kept.make_room(9)
    assert scene.is_kept() == [True, False, True], "and none was given up in vain"
    assert scene.kept.make_room(8)
    assert scene.is_kept() == [False, False, False]


def test_a_trunk_that_groups_share_or_that_is_just_being_joined_makes_no_room() -> None:
    scene = Scene()
    for trunk in scene.trunks:
        scene.kept.keep(trunk, 5)
    scene.left()
    scene.trunks[0].groups.add(scene.trunks[0].first)
    assert not scene.kept.make_room(6, besides=scene.trunks[1])
    assert scene.kept.make_room(4, besides=scene.trunks[1])
    assert scene.is_kept() == [True, True, False]
